#!/usr/bin/env python3
"""Compares what `dtrain plan --trials` says with whole runs of the same layouts.

    scripts/planner/check_trials.py CLUSTER.yaml --probe --layers 12 --hidden 256 --heads 8
        --vocab 2048 --seq-len 128 --global-batch 64 --trials 6 --fixed micro_batch=4

Plans, and trains each of the best layouts twice: for a few small steps, as the option does, and
right after that the whole model with ``scripts/recipes/train_gpt.py``, through `dtrain launch`. It
prints the estimate, the corrected estimate and the measured time of a step for each layout, and how
well both rank the layouts. The cluster file's job gives the environment of both. Of each kind of
step the fastest counts, because other programs may use the machine.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

from dtrain import api, trials
from dtrain.loading import load
from dtrain.parallelism.answer.explain import brief
from dtrain.parallelism.cost.candidate import Candidate
from dtrain.parallelism.question import Answer
from dtrain.parallelism.trial import Trial
from dtrain.plan_file import keys_of
from dtrain.plan_request import PlanRequest
from dtrain.probing import posed
from dtrain.runs.journal import JournalReader
from dtrain.runs.log_store import RunFolder
from dtrain.runs.measured import points
from dtrain.spec.other_job import with_job

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "train_gpt.py"
STEPS = 40
trials.SECONDS = 4.0
SIZES = ("layers", "hidden", "heads", "kv_heads", "ffn_hidden", "experts", "experts_per_token")


def whole(answer: Answer, candidate: Candidate, file: Path) -> float:
    """Seconds of a step of the whole model."""
    shape, request = candidate.shape, load(file)
    layout, training, strategy = keys_of(answer.question, candidate.layout)
    sizes = {
        "steps": STEPS, "width": shape.hidden, "layers": shape.layers, "heads": shape.heads,
        "kv-heads": shape.kv_heads, "mlp-width": shape.ffn_hidden, "vocabulary": shape.vocab,
        "experts": shape.experts, "active": shape.experts_per_token or 2,
    }  # fmt: skip
    job = {
        "framework": "torch",
        "script": str(RECIPE),
        "args": [word for name, value in sizes.items() for word in (f"--{name}", str(value))],
        "strategy": strategy,
        "layout": layout,
        "training": training,
    }
    text = with_job(request.text, job, keep=trials.KEPT, name="whole")
    report = api.launch(replace(request, text=text))
    if not report.ok:
        sys.exit(f"{brief(candidate)}: {report.reason}\n{report.hint}")
    found = points(JournalReader(RunFolder.find(report.run).journal).read())
    return min(one.step_time for one in found if one.step_time is not None)


def compared(request: PlanRequest) -> list[tuple[Trial, float]]:
    """Each of the best layouts' trial, and the seconds of a step of the whole model."""
    file = request.file
    assert file is not None
    answer = posed(request, api.examine, None).answer()
    rows = []
    for candidate in answer.shortlist(request.trials):
        one = replace(answer, plan=replace(answer.plan, fitting=(candidate,)))
        (trial,) = trials.tried(one, 1, load(file), _launch, lambda _: None).trials
        if not trial.ok:
            sys.exit(f"{brief(candidate)}: {trial.failure}\n{trial.hint}")
        quiet = tuple(replace(one, seconds=one.fastest) for one in trial.measured)
        trial = replace(trial, measured=quiet)
        rows.append((trial, whole(answer, candidate, file)))
        _show(*rows[-1])
    return rows


def _launch(job: Any, on_line: Callable[..., object]) -> Any:
    return api.launch(job, on_line=on_line)


def _show(trial: Trial, measured: float) -> None:
    before, after = trial.planned.time.total, trial.corrected.time.total
    layout = trial.planned.layout
    print(
        f"{brief(trial.planned):40} {layout.micro_batch}x{layout.grad_accumulation:<4}"
        f" estimate {before:7.3f} s ({before / measured - 1:+6.1%})"
        f"  corrected {after:7.3f} s ({after / measured - 1:+6.1%})  measured {measured:7.3f} s",
        flush=True,
    )


def summary(name: str, rows: list[tuple[float, float]]) -> str:
    """How well estimates, the first of each row, agree with measurements."""
    errors = [abs(estimate / measured - 1) for estimate, measured in rows]
    mean = math.exp(math.fsum(math.log(a / b) for a, b in rows) / len(rows))
    relative = [abs(a / b / mean - 1) for a, b in rows]
    pairs = list(combinations(rows, 2))
    right = sum((a[0] < b[0]) == (a[1] < b[1]) for a, b in pairs)
    chosen = min(rows)[1] / min(measured for _, measured in rows) - 1
    error, apart = (math.fsum(part) / len(rows) for part in (errors, relative))
    return (
        f"{name}: mean error {error:.1%}, {apart:.1%} after one common factor; {right} of "
        f"{len(pairs)} pairs in the right order; the first layout is {chosen:.1%} slower than the "
        "best"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--probe", action="store_true")
    parser.add_argument("--trials", type=int, default=6)
    parser.add_argument("--fixed", action="append", default=[], metavar="NAME=VALUE")
    for name in (*SIZES, "vocab", "seq_len", "global_batch"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    parser.add_argument("--precision", default="fp32")
    for name in ("hardware", "calibrate"):
        parser.add_argument(f"--{name}", type=Path)
    for name in ("gpus", "gpus_per_host"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    parser.add_argument("--gpu")
    given = vars(parser.parse_args())
    sizes = {name: value for name in SIZES if (value := given.pop(name)) is not None}
    fixed: dict[str, Any] = {}
    for pair in given.pop("fixed"):
        key, _, value = pair.partition("=")
        fixed[key] = int(value) if value.isdigit() else value
    rows = compared(PlanRequest(**given, sizes=sizes, fixed=fixed))
    planned = [(trial.planned.time.total, measured) for trial, measured in rows]
    corrected = [(trial.corrected.time.total, measured) for trial, measured in rows]
    print(summary("estimate", planned))
    print(summary("corrected", corrected))


if __name__ == "__main__":
    main()
