"""One file without a framework around torch: settings as globals, DDP only where RANK is set."""

import math
import os
import sys

import planted
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

# Settings; `--max_steps=8` on the command line overrides one.
max_steps = 4
batch_size = 4
block_size = 16
n_embd = 32
backend = "gloo"
for argument in sys.argv[1:]:
    key, _, value = argument.removeprefix("--").partition("=")
    globals()[key] = type(globals()[key])(value)

ddp = "RANK" in os.environ
if ddp:
    dist.init_process_group(backend)
rank, world_size = (dist.get_rank(), dist.get_world_size()) if ddp else (0, 1)
torch.manual_seed(1337 + rank)


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(64, n_embd)
        self.block = nn.TransformerEncoderLayer(n_embd, 2, 2 * n_embd, batch_first=True)
        self.head = nn.Linear(n_embd, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.head(self.block(self.tokens(x) / math.sqrt(n_embd), mask, is_causal=True))


model = DistributedDataParallel(GPT()) if ddp else GPT()
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
for step in range(max_steps):
    planted.check(step)
    x = torch.randint(64, (batch_size, block_size))
    loss = cross_entropy(model(x).flatten(0, 1), x.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step}: loss {loss.item():.3f}", flush=True)
print(f"trained {step + 1} steps on {world_size} ranks", flush=True)
if ddp:
    del model, optimizer  # they keep the process group
    dist.destroy_process_group()
