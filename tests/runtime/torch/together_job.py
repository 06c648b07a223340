"""Two ranks that must agree although only one of them has the reason.

together_job.py REPORTS
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from oracle import BATCH, Rows, meta_model
from torch import Tensor
from train_gpt import cross_entropy, first_weights

from dtrain.runtime import torch as parallel


class Random(Rows):
    """Augmented: no two reads are equal, and no two ranks draw the same."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = super().__getitem__(index)
        noise = torch.randint(64, inputs.shape, generator=self.generator)
        return noise, targets

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(rank)


def different_data(run: parallel.ParallelRun) -> dict[str, str]:
    changed = Rows()
    changed.rows[-1] += run.rank
    cases = {"length": Rows(64 + run.rank), "content": changed, "random": Random(run.rank)}
    found = {name: refusal(run, dataset) for name, dataset in cases.items()}
    return {**found, "content, read by a worker": refusal(run, changed, workers=1)}


def refusal(run: parallel.ParallelRun, dataset: Rows, workers: int = 0) -> str:
    try:
        run.batches(dataset, workers=workers)
    except ValueError as error:
        return str(error)
    return ""


def overflow(layout: parallel.Layout) -> dict[str, Any]:
    """Steps of fp16 training: the first overflows on the second rank alone."""
    run = parallel.init(None, layout, parallel.Training(BATCH, "fp16"))
    model = run.parallelize(meta_model(), loss=cross_entropy, init=first_weights)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    first = model.parameters()[0].detach().clone()
    scale = model.loss_scale.scale
    taken, scales = [], []
    for step, (inputs, targets) in enumerate(run.batches(Rows(), seed=0)):
        model.gradients(inputs, targets)
        if step == 0 and run.rank == 1:
            gradient = model.parameters()[-1].grad
            assert gradient is not None
            gradient.fill_(torch.inf)
        if step == 1:
            model.clip_gradients(1.0)
        taken.append(model.step(optimizer))
        scales.append(model.loss_scale.scale / scale)
        if step == 0:
            kept = torch.equal(torch.as_tensor(first), model.parameters()[0].detach())
        if step == 1:
            break
    return {"taken": taken, "scales": scales, "kept": kept}


def norm_with_a_frozen_stage() -> float:
    run = parallel.init(None, parallel.Layout(pipeline=2), parallel.Training(BATCH))
    model = run.parallelize(meta_model(), loss=cross_entropy, init=first_weights)
    inputs, targets = next(iter(run.batches(Rows())))
    model.gradients(inputs, targets)
    if run.rank == 0:
        for parameter in model.parameters():
            parameter.grad = None
    return model.gradient_norm().item()


def main() -> None:
    with parallel.init(training=parallel.Training(BATCH)) as run:
        report = {
            "data": different_data(run),
            "ddp": overflow(parallel.Layout(data=2)),
            "pipeline": overflow(parallel.Layout(pipeline=2)),
            "frozen": norm_with_a_frozen_stage(),
        }
    Path(sys.argv[1], f"{run.rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
