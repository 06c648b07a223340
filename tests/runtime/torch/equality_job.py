"""One rank that trains the oracle's model in several layouts, one after the other, in one process
group, and reports how far each is from the oracle.

    equality_job.py CASES.json REPORT.json        cases: {name: {strategy, layout, precision}}
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from oracle import BATCH, SEED, STEPS, Rows, expected, meta_model, optimizer_of
from torch import Tensor
from torch.distributed.tensor import DTensor
from train_gpt import cross_entropy, first_weights

from dtrain.runtime import torch as parallel


def train(run: parallel.Run, steps: int = STEPS) -> tuple[list[float], list[float], Any]:
    model = run.parallelize(meta_model(), loss=cross_entropy, init=first_weights, seed=SEED)
    optimizer = optimizer_of(model.parameters())
    losses, norms = [], []
    for inputs, targets in run.batches(Rows(), seed=SEED):
        losses.append(model.gradients(inputs, targets).item())
        norms.append(model.clip_gradients(1.0).item())
        model.step(optimizer)
        if len(losses) == steps:
            # Loss without gradients must agree with a pass that has them.
            held = model.loss(inputs, targets).item()
            again = model.gradients(inputs, targets).item()
            assert abs(held - again) < 1e-3, (held, again)
            return losses, norms, model
    raise AssertionError


def whole_weights(model: parallel.ParallelModel) -> dict[str, Tensor]:
    """The weights by name, put together from all ranks."""
    mine = {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach()
        for name, p in model.named_parameters()
    }
    parts: list[dict[str, Tensor]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(parts, mine)
    whole: dict[str, Tensor] = {}
    for part in parts:
        for name, weight in part.items():
            if name in whole:
                assert torch.equal(whole[name], weight), f"ranks differ in {name}"
            whole[name] = weight
    return whole


def compare(run: parallel.Run, wanted: Any) -> dict[str, Any]:
    losses, norms, model = train(run)
    weights = whole_weights(model)
    assert weights.keys() == wanted[2].keys(), weights.keys() ^ wanted[2].keys()
    return {
        "losses": losses,
        "loss": max(abs(a / b - 1) for a, b in zip(losses, wanted[0], strict=True)),
        "norm": max(abs(a / b - 1) for a, b in zip(norms, wanted[1], strict=True)),
        "weights": max((weights[n] - w).abs().max().item() for n, w in wanted[2].items()),
    }


def main() -> None:
    cases = json.loads(Path(sys.argv[1]).read_text())
    wanted = expected()
    report: dict[str, Any] = {}
    first = parallel.init(training=parallel.Training(global_batch=BATCH))
    for name, case in cases.items():
        training = parallel.Training(global_batch=BATCH, precision=case.get("precision"))
        layout = parallel.Layout(**case["layout"]) if "layout" in case else None
        try:
            run = parallel.init(case.get("strategy"), layout, training)
            report[name] = compare(run, wanted)
        except Exception:
            if "--keep-going" not in sys.argv:
                raise
            report[name] = {"error": traceback.format_exc()}
            if first.rank == 0:
                print(name, "FAILED", traceback.format_exc()[-1500:], flush=True)
            continue
        if first.rank == 0:
            print(name, {k: v for k, v in report[name].items()}, flush=True)
    if first.rank == 0:
        Path(sys.argv[2]).write_text(json.dumps({"wanted": wanted[0], "cases": report}))
    first.close()


if __name__ == "__main__":
    main()
