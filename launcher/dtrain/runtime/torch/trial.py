"""Trains a few steps of a small model in a layout, and prints how long they took.

`dtrain plan --trials` starts it on every rank, as ``python -m dtrain.runtime.torch.trial JSON``.
The model has the planned width, but few layers; weights and tokens are random. The argument says
which numbers of layers and of micro-batches to train (see `dtrain.parallelism.trial`). The first
rank prints a line for each, as soon as it is measured.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from dtrain.runtime import progress
from dtrain.runtime import torch as parallel
from dtrain.runtime.torch.trial_model import Decoder, TrialSizes, cross_entropy, small_weights

MARK = "dtrain-trial: "
"""Before the JSON object of each line."""
WARM_UP = 2
"""Steps that are not measured: the first ones make the optimizer's states and fill caches."""
LEAST, MOST = 5, 100
"""Steps that are measured; their median counts."""

_numbers = count(1)
"""Of all steps, for the launcher."""


def train(run: parallel.ParallelRun, order: dict[str, Any]) -> None:
    """Train each case of the order, and print its measurement on the first rank."""
    sizes, whole = TrialSizes(**order["model"]), run.layout
    for layers, micro_batches in order["cases"]:
        run.layout = replace(whole, grad_accumulation=micro_batches)
        found = _measured(run, replace(sizes, layers=layers), order["seconds"])
        line = {"layers": layers, "micro_batches": micro_batches, **found}
        run.print(MARK + json.dumps(line))


def _measured(run: parallel.ParallelRun, sizes: TrialSizes, limit: float) -> dict[str, Any]:
    """The seconds of a step, from steps of about ``limit`` seconds together, and the most memory
    that any rank used."""
    _forget_memory(run)
    step = step_of(run, sizes)
    for _ in range(WARM_UP):
        once = step()
    number = int(_most(run, min(MOST, max(LEAST, limit / max(once, 1e-6)))))
    every = [step() for _ in range(number)]
    return {
        "seconds": _most(run, median(every)),
        "fastest": _most(run, min(every)),
        "steps": number,
        **_memory(run),
    }


def step_of(run: parallel.ParallelRun, sizes: TrialSizes) -> Callable[[], float]:
    """Build a model in the run's layout. Each call trains it for a step and returns the seconds."""
    with torch.device("meta"):
        decoder = Decoder(sizes)
        if sizes.tied:
            decoder.head.weight = decoder.embedding.weight
    model = run.parallelize(decoder, loss=cross_entropy, init=small_weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    here = run.layout.global_batch // run.data_size
    shape = (here, run.training.seq_len or 1)
    inputs, targets = torch.randint(sizes.vocab, (2, *shape), device=run.device)

    def step() -> float:
        # The launcher stops a job that reports nothing for minutes.
        progress(next(_numbers))
        _settle(run)
        begun = time.perf_counter()
        model.gradients(inputs, targets)
        model.clip_gradients(1.0)
        model.step(optimizer)
        _settle(run)
        return time.perf_counter() - begun

    return step


def _settle(run: parallel.ParallelRun) -> None:
    """Wait for this rank's device. Collectives of a step make ranks wait for each other."""
    if run.device.type == "cuda":
        torch.cuda.synchronize()


def _most(run: parallel.ParallelRun, value: float) -> float:
    """The largest value of all ranks."""
    found = torch.tensor(value, dtype=torch.float64, device=run.device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def _forget_memory(run: parallel.ParallelRun) -> None:
    """Free the model before, and measure from here."""
    gc.collect()  # hooks and schedules refer to each other
    if run.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return
    with suppress(OSError):  # only Linux has it
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _memory(run: parallel.ParallelRun) -> dict[str, float]:
    """Bytes on the fullest rank: of the GPU's allocator, or of a CPU process."""
    if run.device.type == "cuda":
        return {"allocated": _most(run, torch.cuda.max_memory_allocated())}
    return {"resident": _most(run, _resident())}


def _resident() -> int:
    """The most memory of this process since `_forget_memory`; 0 if the system does not tell."""
    with suppress(OSError, ValueError, IndexError):
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        return int(status.split("VmHWM:", 1)[1].split(None, 1)[0]) << 10
    return 0


def main() -> None:
    order = json.loads(sys.argv[1])
    with parallel.init() as run:
        train(run, order)


if __name__ == "__main__":
    main()
