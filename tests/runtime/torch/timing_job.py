"""Two ranks, the second of which is slow in its blocks, in several layouts.

timing_job.py REPORTS
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from oracle import BATCH, Rows, meta_model
from torch import Tensor, nn
from train_gpt import cross_entropy, first_weights

from dtrain.runtime import torch as parallel
from dtrain.runtime.progress import steps

STEPS = 3
LAYOUTS = {
    "fsdp": parallel.Layout(data=2, sharding="full", micro_batch=4),
    "pipeline": parallel.Layout(pipeline=2, micro_batch=4),
    "tensor": parallel.Layout(tensor=2, micro_batch=8),
}


def make_slow() -> None:
    """Make every Linear layer slow, as a slow GPU would."""
    forward = nn.Linear.forward

    def slow(self: nn.Linear, x: Tensor) -> Any:
        time.sleep(0.03 if os.environ["RANK"] == "1" else 0.001)
        return forward(self, x)

    nn.Linear.forward = slow  # type: ignore[method-assign]


def measured(layout: parallel.Layout) -> list[float]:
    """Seconds that this rank computes in each step, as it reports them."""
    run = parallel.init(None, layout, parallel.Training(BATCH))
    found: list[Any] = []
    steps.add = lambda step, compute: found.append(compute)  # type: ignore[method-assign]
    model = run.parallelize(meta_model(), loss=cross_entropy, init=first_weights)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for number, (inputs, targets) in enumerate(run.batches(Rows(), seed=0)):
        model.gradients(inputs, targets)
        model.step(optimizer)
        if number == STEPS:
            break
    model.loss(inputs, targets)  # an evaluation is not counted
    return found[1:]


def main() -> None:
    make_slow()
    report = {name: measured(layout) for name, layout in LAYOUTS.items()}
    rank = torch.distributed.get_rank()
    (Path(sys.argv[1]) / f"{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
