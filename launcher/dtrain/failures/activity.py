"""Find slow ranks by the activity of their GPUs, where no rank measures its steps. Pure.

A GPU that waits in a collective is busy: NCCL's kernels poll. So of GPUs that work in lock-step,
the others wait for the one that is busy least, while its CPU or its data holds it up. This shows
large differences only. A GPU that is slow because of its clock is as busy as the others; it is
named by its clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import median

from dtrain.messages.telemetry import GpuSample
from dtrain.records import dataclass

MEMORY = 120.0
"""Seconds: the time constant of the averages. A checkpoint of half a minute names no rank."""
LEAST_SECONDS = 60.0
"""Of samples, before a GPU is judged."""
BUSY = 50.0
"""Percent: below it, the job waits for something else."""
LESS, RECOVERED = 25.0, 15.0
"""Percent points below the median: a rank is slow from the first on, and until the second."""
SLOWER_CLOCK = 0.1
"""Part of the usual clock that a throttled GPU lacks."""


@dataclass(slots=True)
class _Gpu:
    process: str
    host: str
    since: float
    then: float
    use: float
    clock: float | None = None
    throttled: bool = False
    slow: bool = False
    slower: float = 0.0


class GpuActivity:
    """The GPUs of one attempt."""

    def __init__(self) -> None:
        self._gpus: dict[tuple[str, int], _Gpu] = {}

    def add(self, host: str, gpus: Iterable[tuple[str, GpuSample]], now: float) -> None:
        """A sample of the job's GPUs on a host, each with the process that uses it."""
        for process, sample in gpus:
            if sample.use is None:
                continue
            use = min(sample.use, 100.0)
            gpu = self._gpus.setdefault((host, sample.index), _Gpu(process, host, now, now, use))
            part = 1 - math.exp(-max(0.0, now - gpu.then) / MEMORY)
            gpu.use += part * (use - gpu.use)
            gpu.process, gpu.then, gpu.clock = process, now, sample.clock
            gpu.throttled = sample.throttled

    def slow(self, now: float) -> list[tuple[str, str, float]]:
        """The process and host of each slow GPU, the slowest first, and how much less it works, as
        a fraction."""
        known = [
            gpu
            for gpu in self._gpus.values()
            if gpu.then - gpu.since >= LEAST_SECONDS and now - gpu.then < LEAST_SECONDS
        ]
        usual = median([gpu.use for gpu in known]) if len(known) > 1 else 0.0
        clocks = [gpu.clock for gpu in known if gpu.clock]
        clock = median(clocks) if clocks else 0.0
        for gpu in known:
            less = 1 - (gpu.clock or clock) / clock if gpu.throttled and clock else 0.0
            limit = RECOVERED if gpu.slow else LESS
            gpu.slow = usual >= BUSY and (usual - gpu.use > limit or less > SLOWER_CLOCK)
            gpu.slower = max(less, 1 - gpu.use / usual) if gpu.slow else 0.0
        found = sorted((gpu for gpu in known if gpu.slow), key=lambda gpu: -gpu.slower)
        if len(found) * 2 > len(known):
            return []
        return [(gpu.process, gpu.host, round(gpu.slower, 3)) for gpu in found]
