"""One rank that trains the oracle's models in several layouts, one after the other in one process
group, and reports how far each is from the oracle.

    layouts_job.py CASES.json REPORT.json CHECKPOINTS

A case has what `init` takes (strategy, layout, precision), the kind of model, and perhaps ``stop``,
a step to save a checkpoint after, or ``resume``, to start from that checkpoint.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from oracle import BATCH, CONFIG, SEED, STEPS, Rows, expected, meta_model, optimizer_of, padded
from torch import Tensor
from torch.distributed.tensor import DTensor
from train_gpt import cross_entropy, first_weights

from dtrain.runtime import torch as parallel
from dtrain.runtime.torch import checkpoint


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
            assert torch.equal(whole.setdefault(name, weight), weight), f"ranks differ in {name}"
    return whole


def train(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    # Half as many passes as with the default of one sequence, which the strategies have.
    layout = parallel.Layout(**{"micro_batch": 2, **case["layout"]}) if "layout" in case else None
    training = parallel.Training(global_batch=BATCH, precision=case.get("precision"))
    run = parallel.init(case.get("strategy"), layout, training)
    kind = case.get("kind", "plain")
    # Another seed, if the weights must come from the checkpoint.
    seed = SEED + 1 if "resume" in case else SEED
    widths = []

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        widths.append(
            logits.to_local().shape[-1] if isinstance(logits, DTensor) else CONFIG.vocabulary
        )
        if case.get("loss") == "own":
            chances = logits.log_softmax(-1).gather(-1, targets.unsqueeze(-1))
            return -chances.mean()
        if kind == "padded":
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return cross_entropy(logits, targets)

    def count(targets: Tensor) -> Tensor:
        return (targets != -100).sum()

    model = run.parallelize(
        meta_model(kind),
        loss=loss,
        count=count if kind == "padded" else None,
        init=first_weights,
        seed=seed,
    )
    optimizer = optimizer_of(model.parameters())
    batches = run.batches(Rows(), seed=SEED)
    start = checkpoint.restore(folder, model, optimizer, batches) if "resume" in case else 0
    losses, norms = [], []
    for step, (inputs, targets) in enumerate(batches, start=start + 1):
        if kind == "padded":
            targets = padded(inputs, targets)
        if step == STEPS:
            # The pass without gradients, between two with them.
            held_out = model.loss(inputs, targets).item()
        losses.append(model.gradients(inputs, targets).item())
        norms.append(model.clip_gradients(1.0).item())
        model.step(optimizer)
        if step == case.get("stop"):
            checkpoint.save(folder, step, model, optimizer, batches)
        if step == STEPS:
            break
    assert abs(held_out / losses[-1] - 1) < 1e-5, "loss() is not what gradients() found"
    return {
        "start": start,
        "losses": losses,
        "norms": norms,
        "weights": whole_weights(model),
        "logits": widths[-1] if widths else None,
    }


def compare(found: dict[str, Any], wanted: Any) -> dict[str, Any]:
    losses, norms, weights = wanted
    start = found["start"]
    assert weights.keys() == found["weights"].keys()
    return {
        "start": start,
        "losses": found["losses"],
        "logits": found["logits"],
        "loss": distance(found["losses"], losses[start:]),
        "norm": distance(found["norms"], norms[start:]),
        "weights": max((found["weights"][n] - w).abs().max().item() for n, w in weights.items()),
    }


def distance(found: list[float], wanted: list[float]) -> float:
    return max(abs(one / other - 1) for one, other in zip(found, wanted, strict=True))


def main() -> None:
    # Without a C++ compiler, and faster.
    torch.compile = functools.partial(torch.compile, backend="aot_eager")  # type: ignore[assignment]
    cases = json.loads(Path(sys.argv[1]).read_text())
    first = parallel.init(training=parallel.Training(global_batch=BATCH))
    wanted = {kind: expected(kind) for kind in {c.get("kind", "plain") for c in cases.values()}}
    report = {}
    for name, case in cases.items():
        found = train(case, Path(sys.argv[3], case.get("kind", "plain")))
        report[name] = compare(found, wanted[case.get("kind", "plain")])
        first.print(name, report[name])
    if first.is_first:
        Path(sys.argv[2]).write_text(json.dumps(report))
    first.close()


if __name__ == "__main__":
    main()
