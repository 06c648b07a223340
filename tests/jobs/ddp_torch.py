"""Fit one weight with DistributedDataParallel over gloo, and print it as JSON with the losses."""

import json

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
# Rank 0 sees only 1, and the other ranks larger numbers: without averaged gradients they differ.
inputs = torch.full((8, 1), 1.0 + rank / 2)
losses = []
for _ in range(50):
    loss = ((model(inputs) - 3 * inputs) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
result = {"weight": model.module.weight.item(), "first": losses[0], "last": losses[-1]}
print(json.dumps({"rank": rank, "world": dist.get_world_size(), **result}))
dist.destroy_process_group()
