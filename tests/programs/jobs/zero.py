"""DeepSpeed ZeRO-1 without DeepSpeed's launcher."""

import deepspeed
import planted
import torch

# Compiling this operation for CPUs takes a minute.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed()
model = torch.nn.Linear(4, 1)
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.AdamW(model.parameters(), 0.1),
    config={
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    },
)
for step in range(4):
    planted.check(step)
    x = torch.randn(4, 4)
    loss = ((engine(x) - x.sum(1, keepdim=True)) ** 2).mean()
    engine.backward(loss)
    engine.step()
ranks = deepspeed.comm.get_world_size()
stage = engine.zero_optimization_stage()
print(f"trained {engine.global_steps} steps on {ranks} ranks with ZeRO-{stage}", flush=True)
