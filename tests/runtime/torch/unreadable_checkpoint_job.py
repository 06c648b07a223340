"""Ranks that find the newest of their checkpoints damaged, and others that run a program when torch
reads them. They train a part of the model, with an optimizer that also keeps numbers.

unreadable_checkpoint_job.py CHECKPOINTS REPORTS
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from oracle import BATCH, SEED, Rows, meta_model
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from train_gpt import cross_entropy, first_weights

from dtrain.runtime import torch as parallel
from dtrain.runtime.torch import checkpoint


class Averaged(torch.optim.Optimizer):
    """Follows the mean of the last gradients."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["steps"] = state.get("steps", 0) + 1
                mean = state.setdefault("mean", torch.zeros_like(parameter))
                parameter -= mean.lerp_(parameter.grad, 0.5)


class Planted:
    """Its pickle makes the folder ``ran`` among the reports."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (os.path.join(sys.argv[2], "ran"),)


def built(run: parallel.ParallelRun, seed: int) -> tuple[parallel.ParallelModel, Averaged]:
    whole = meta_model()
    whole.embedding.weight.requires_grad_(False)
    model = run.parallelize(whole, loss=cross_entropy, init=first_weights, seed=seed)
    return model, Averaged(p for p in model.parameters() if p.requires_grad)


def values(model: parallel.ParallelModel, optimizer: Averaged) -> dict[str, Any]:
    last = model.parameters()[-1]
    state = optimizer.state[last]
    return {
        "steps": state["steps"],
        "sums": [one.to_local().double().sum().item() for one in (last, state["mean"])],
        "state": len(optimizer.state_dict()["state"]),
    }


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def main() -> None:
    folder = Path(sys.argv[1])
    report: dict[str, Any] = {}
    with parallel.init("fsdp", training=parallel.Training(BATCH)) as run:
        model, optimizer = built(run, SEED)
        batches = run.batches(Rows(), seed=SEED)
        for step, (inputs, targets) in enumerate(batches, start=1):
            model.gradients(inputs, targets)
            model.step(optimizer)
            checkpoint.save(folder, step, model, optimizer, batches)
            if step == 2:
                report["second"] = values(model, optimizer)
            if step == 3:
                break
        report["kept"] = names(folder)

        run.should_stop()
        optimizer.state[model.parameters()[-1]]["steps"] = Planted()
        checkpoint.save(folder, 5, model, optimizer, keep=9)
        planted = folder / "step-00000004"
        if run.is_first:
            shutil.copytree(folder / "step-00000003", planted)
            (planted / ".metadata").write_bytes(pickle.dumps(Planted()))
            # Only the other rank reads it.
            (part,) = (folder / "step-00000003").glob("__1_*.distcp")
            part.write_bytes(part.read_bytes()[: part.stat().st_size // 2])
        run.should_stop()
        model, optimizer = built(run, SEED + 1)
        report["restored"] = checkpoint.restore(folder, model, optimizer, batches)
        report["found"] = values(model, optimizer)
        report["samples"] = batches.state_dict()["samples"]
        if run.is_first:
            for left in (planted, folder / "step-00000005"):
                shutil.rmtree(left)
        checkpoint.save(folder, 2, model, optimizer, batches, keep=1)
        report["kept then"] = names(folder)

        if run.is_first:
            (folder / "step-00000002" / "training.json").write_text("")
        run.should_stop()
        try:
            checkpoint.restore(folder, model, optimizer, batches)
        except CheckpointException as error:
            report["refused"] = sorted(error.failures)
    Path(sys.argv[2], f"{run.rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
