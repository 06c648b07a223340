"""A training loop with Lightning Fabric."""

import os

import planted
import torch
from lightning.fabric import Fabric

fabric = Fabric(
    accelerator="cpu",
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    num_nodes=int(os.environ["NNODES"]),
    strategy="ddp",
)
fabric.launch()
fabric.seed_everything(1)
model = torch.nn.Linear(4, 1)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))
data = fabric.setup_dataloaders(torch.utils.data.DataLoader(torch.randn(32, 4), batch_size=4))
ranks = len(fabric.all_gather(torch.ones(1)))
for step, x in enumerate(data):
    planted.check(step)
    loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
    fabric.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
print(f"trained {step + 1} steps on {ranks} ranks", flush=True)
