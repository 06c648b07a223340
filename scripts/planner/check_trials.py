#!/usr/bin/env python3
"""Compares what `dtrain plan --trials` says with steps of the whole model.

    torchrun --nproc-per-node 2 scripts/planner/check_trials.py --hardware cpu-x2-hardware.json
        --calibrate cpu-x2.json --layers 16 --hidden 128 --heads 4 --vocab 2048 --seq-len 128
        --global-batch 16 --count 6 --fixed micro_batch=2

Trains the best layouts, each with the small models of its trial and with the whole model, all in
one job. One step of each follows another, for several rounds, so that other programs on the machine
slow all of them alike; of each, the median counts. Prints the estimate, the corrected estimate and
the measured time of a whole step for each layout, and how well both rank the layouts. The two files
are those of `dtrain plan --probe` on this machine.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from dtrain.parallelism.answer.explain import brief
from dtrain.parallelism.cost.candidate import Candidate
from dtrain.parallelism.trial import Case, Measured, Trial, cases
from dtrain.planning.question import pose
from dtrain.planning.request import PlanRequest
from dtrain.planning.written import keys_of
from dtrain.runtime import torch as parallel
from dtrain.runtime.torch.trial import step_of
from dtrain.runtime.torch.trial_model import Sizes

WARM_UP, ROUNDS = 2, 15
SIZES = ("layers", "hidden", "heads", "kv_heads", "ffn_hidden", "experts", "experts_per_token")
Steps = dict[Case, Callable[[], float]]


def steps_of(candidate: Candidate, strategy: str, device: torch.device) -> Steps:
    """The steps of a layout's trial, and that of the whole model, which comes last."""
    shape, layout = candidate.shape, candidate.layout
    values = {name: value for name, value in asdict(shape).items() if name in _NAMES}
    training = parallel.Training(layout.global_batch, candidate.assumed.precision, shape.seq_len)
    run = parallel.ParallelRun(strategy, layout, training, device, owns=False)
    found: Steps = {}
    for case in (*cases(shape, layout), Case(shape.layers, layout.grad_accumulation)):
        if case not in found:
            run.layout = replace(layout, grad_accumulation=case.micro_batches)
            found[case] = step_of(run, Sizes(**{**values, "layers": case.layers}))
    return found


_NAMES = {one.name for one in fields(Sizes)}


def medians(every: list[Steps]) -> list[dict[Case, float]]:
    """The seconds of each step, on the slowest rank."""
    times: list[dict[Case, list[float]]] = [{case: [] for case in steps} for steps in every]
    for number in range(WARM_UP + ROUNDS):
        for steps, kept in zip(every, times, strict=True):
            for case, step in steps.items():
                seconds = step()
                if number >= WARM_UP:
                    kept[case].append(seconds)
    return [{case: _slowest(median(kept[case])) for case in kept} for kept in times]


def _slowest(value: float) -> float:
    found = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


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


def parsed() -> tuple[PlanRequest, int]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=6, help="layouts to compare")
    parser.add_argument("--fixed", action="append", default=[], metavar="NAME=VALUE")
    for name in (*SIZES, "vocab", "seq_len", "global_batch"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    parser.add_argument("--precision", default="fp32")
    for name in ("hardware", "calibrate"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    given = vars(parser.parse_args())
    count: int = given.pop("count")
    sizes = {name: value for name in SIZES if (value := given.pop(name)) is not None}
    fixed: dict[str, Any] = {}
    for pair in given.pop("fixed"):
        key, _, value = pair.partition("=")
        fixed[key] = int(value) if value.isdigit() else value
    ranks = dist.get_world_size()
    request = PlanRequest(
        **given, sizes=sizes, fixed=fixed, gpu="cpu", gpus=ranks, gpus_per_host=ranks
    )
    return request, count


def main() -> None:
    with parallel.init(device="cpu") as run:
        request, count = parsed()
        question = pose(request)
        chosen = question.answer().shortlist(count)
        every = [
            steps_of(candidate, keys_of(question, candidate.layout)[2], run.device)
            for candidate in chosen
        ]
        planned, corrected = [], []
        for candidate, times in zip(chosen, medians(every), strict=True):
            layout = candidate.layout
            whole = times[Case(candidate.shape.layers, layout.grad_accumulation)]
            small = [
                Measured(one, times[one], times[one]) for one in cases(candidate.shape, layout)
            ]
            trial = Trial(candidate, tuple(small))
            before, after = candidate.time.total, trial.corrected.time.total
            planned.append((before, whole))
            corrected.append((after, whole))
            run.print(
                f"{brief(candidate):28} {layout.micro_batch}x{layout.grad_accumulation:<4}"
                f" estimate {before:7.3f} s ({before / whole - 1:+6.1%})"
                f"  corrected {after:7.3f} s ({after / whole - 1:+6.1%})  measured {whole:7.3f} s"
            )
        run.print(summary("estimate", planned))
        run.print(summary("corrected", corrected))


if __name__ == "__main__":
    main()
