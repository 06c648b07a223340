"""A training loop with accelerate. As in accelerate's examples, `--cpu` trains on CPUs."""

import argparse

import planted
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--cpu", action="store_true")
accelerator = Accelerator(cpu=parser.parse_args().cpu)
set_seed(1)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
data = torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=4)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
ranks = len(accelerator.gather(torch.ones(1)))
for step, x in enumerate(data):
    planted.check(step)
    loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
print(f"trained {step + 1} steps on {ranks} ranks", flush=True)
