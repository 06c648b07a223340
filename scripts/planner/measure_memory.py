#!/usr/bin/env python3
"""Peak memory of real training on 8 CPU processes, beside the planner's prediction.

    torchrun --nproc-per-node 8 scripts/planner/measure_memory.py [CASE]

Trains a small model of the shape of ``configs/gpt-100b.yaml`` for two steps in a layout of the same
kind: tensor, pipeline and data parallelism, ZeRO-1, sequence parallelism and selective recompute in
bf16. Each process counts its live tensors, as ``track_memory.py`` does, but here the tensors have
values, the processes communicate, and the losses are those of training. Prints a line for each
pipeline stage; ends with 1 if a prediction is more than 4 % off.

CASE is a JSON object as for ``track_memory.py``, for another model or layout.
"""

from __future__ import annotations

import json
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the name everyone gives it
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))
import track_memory
from track_memory import GPT, Tracker, config_of, cross_entropy
from train_gpt import first_weights

from dtrain.parallelism.assumptions import Assumptions
from dtrain.parallelism.cluster.hardware import GIB
from dtrain.parallelism.cost.memory import stage_memory
from dtrain.parallelism.model.shape import Shape
from dtrain.runtime import torch as parallel
from dtrain.runtime.torch import recompute

CASE: dict[str, Any] = {
    "model": {
        "layers": 4, "hidden": 256, "heads": 8, "kv_heads": 2, "ffn_hidden": 800, "vocab": 3200,
        "seq_len": 256,
    },
    "layout": {
        "tensor": 2, "pipeline": 2, "data": 2, "sharding": "optimizer", "grad_accumulation": 4,
        "recompute": "selective", "sequence_parallel": True,
    },
}  # fmt: skip
STEPS = 2
TOLERANCE = 0.04


class _RMSNorm(torch.autograd.Function):
    """Saves what the GPU's kernel saves: the input and one number for each token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        scale = (x.float().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        ctx.save_for_backward(x, weight, scale)
        return ((x * scale) * weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor]:
        x, weight, scale = ctx.saved_tensors
        normalized, scaled = x * scale, gradients[0] * weight
        inner = scaled - normalized * (scaled * normalized).mean(-1, keepdim=True)
        rows = tuple(range(x.dim() - 1))
        by_weight = (gradients[0] * normalized).sum(rows)
        return (inner * scale).to(x.dtype), by_weight.to(weight.dtype)


def measured(case: dict[str, Any], run: parallel.ParallelRun) -> int:
    """Bytes of this rank's live tensors at the peak of the last step."""
    layout, length = run.layout, case["model"]["seq_len"]
    tracker = Tracker()
    resize = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> None:
        resize(storage, size)
        tracker.resized(storage)

    to_host, from_host = track_memory.host_memory(tracker)
    copied = track_memory.between_host_and_device(tracker)
    copies: AbstractContextManager[Any] = (
        patch.object(Tensor, "to", copied) if layout.offload else nullcontext()
    )
    with (
        patch.object(recompute, "to_host", to_host),
        patch.object(recompute, "from_host", from_host),
        patch.object(torch.UntypedStorage, "resize_", resize_),
        patch.object(F, "rms_norm", track_memory._rms_norm),
        patch.object(track_memory, "_FusedRMSNorm", _RMSNorm),
    ):
        with torch.device("meta"):
            gpt = GPT(config_of(case["model"]))
        model = run.parallelize(gpt, loss=cross_entropy, init=first_weights)
        del gpt
        optimizer = track_memory._adamw(model)
        here = layout.global_batch // run.data_size
        inputs, targets = torch.zeros(2, here, length, dtype=torch.int64)
        tracker.states(model.parameters(), offload=layout.offload)
        with tracker, copies:
            for _ in range(STEPS):
                tracker.peak = 0
                loss = model.gradients(inputs, targets)
                model.clip_gradients(1.0)
                model.step(optimizer)
                del loss
    return tracker.peak


def main() -> None:
    case = json.loads(sys.argv[1]) if len(sys.argv) > 1 else CASE
    layout, model = parallel.Layout(**case["layout"]), case["model"]
    shape = Shape(head_size=model["hidden"] // model["heads"], **model)
    training = parallel.Training(layout.global_batch, "bf16", shape.seq_len)
    with parallel.init("3d", layout, training, device="cpu") as run:
        mine = torch.tensor([run.mesh["pipeline"].get_local_rank(), measured(case, run)])
        every = [torch.zeros_like(mine) for _ in range(run.world_size)]
        dist.all_gather(every, mine)
        errors = []
        for stage in range(layout.pipeline):
            peak = max(int(bytes_) for place, bytes_ in every if place == stage)
            planned = stage_memory(shape, layout, Assumptions(), stage).allocated * GIB
            errors.append(planned / peak - 1)
            run.print(
                f"stage {stage}: {peak / 2**20:.1f} MiB, planned {planned / 2**20:.1f} MiB"
                f" ({errors[-1]:+.1%})"
            )
    sys.exit(max(map(abs, errors)) > TOLERANCE)


if __name__ == "__main__":
    main()
