"""torch RPC: rank 0 asks the others."""

import os

import planted
import torch
import torch.distributed.rpc as rpc


def square(step: int) -> torch.Tensor:
    planted.check(step)
    return torch.tensor(step**2)


rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
rpc.init_rpc(f"rank{rank}", rank=rank, world_size=size)
if rank == 0:
    for step in range(4):
        answers = [rpc.rpc_async(f"rank{other}", square, (step,)) for other in range(1, size)]
        total = sum(answer.wait() for answer in answers)
    print(f"trained {step + 1} steps on {len(answers) + 1} ranks, {total}", flush=True)
rpc.shutdown()
