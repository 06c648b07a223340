"""Find the slow ranks of a synchronous job. Pure.

Synchronous ranks finish each step together, so the time of a step names no slow rank. Each rank
therefore measures how long it is *busy* in a step: it computes, or waits for data. The rest of the
step it waits for the others. `dtrain.runtime` sends averages over blocks of `STEPS` steps.

A block is judged once all ranks have sent it. Ranks that do the same work form a group, such as the
ranks of one pipeline stage. In each group, the lower quartile of the busy times is normal. It stays
normal when half of the ranks are slow, as with one bad host of two. A rank is slow if its busy time
exceeds the normal one by `SLOWER` in `SLOW_BLOCKS` of the last `BLOCKS` blocks. It recovers once at
most `RECOVERED_BLOCKS` do.

With these limits, a rank that is 10 % slower is found within 100 steps. In 10,000 steps of 1,024
equal ranks whose times vary by 5 % (standard deviation), no rank is found.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import field
from itertools import chain
from statistics import median
from types import MappingProxyType
from typing import Annotated, Literal

from dtrain.hostlist import fold, in_order
from dtrain.launchplan.names import name_processes
from dtrain.messages.decode import Range
from dtrain.messages.telemetry import GpuSample, Sample
from dtrain.records import dataclass
from dtrain.runtime.steps import STEPS

SLOWER = 0.06
"""Half-way between the noise of a block and a rank that is 10 % slower."""
BLOCKS, SLOW_BLOCKS, RECOVERED_BLOCKS = 8, 5, 2
LEAST_SHARE = 0.02
"""Part of a step that a slow rank must cost: a step that only waits for the network has no
stragglers."""
MAX_WAITING = 64
"""Maximum of incomplete blocks. Beyond it, the oldest is judged without the missing ranks."""

LONGER = 0.15
"""If all ranks wait longer than usual by this part of a step, the network is slow."""
USUAL = 64
"""Blocks from which the usual wait is taken."""
MANY_LOSSES = 10.0
"""Lost packets per second from which a host's network may be the cause."""

BUSY_CPUS, FOREIGN_CPUS = 0.9, 0.1
"""Fractions of a host's CPUs. The job lacks CPU time if more than the first are busy, and more than
the second with processes outside the job."""

LONG = 0.3
"""If all ranks wait for this part of each step, and one host is far, its network is slow."""

Cause = Literal["data", "cpu", "clock", "gpu", "network", "far", "unknown"]
CAUSES: Mapping[Cause, str] = {
    "data": "waits for data",
    "cpu": "other processes use the CPU",
    "clock": "the GPU's clock is throttled",
    "gpu": "other processes use the GPU",
    "network": "its host loses packets on the network",
    "far": "its host is slow on the network",
    "unknown": "cause unknown",
}

Seen = Mapping[tuple[str, str], Collection[Cause]]
"""The causes that the telemetry shows, by host and process."""

RECOVERED = "no rank is slower than the others any more"

_Seconds = Annotated[float, Range(0, 1e7)]


@dataclass(frozen=True, slots=True)
class Block:
    """Means over `STEPS` steps of one rank, in seconds."""

    number: Annotated[int, Range(0, (1 << 63) - 1)]
    """Steps ``number * STEPS + 1`` to ``(number + 1) * STEPS``."""
    step: _Seconds
    """A whole step, with the wait for the other ranks."""
    compute: _Seconds | None
    """None if unknown. Then only the wait for data is compared."""
    data: _Seconds
    """Wait for data."""
    queued: _Seconds
    """Time in which the main thread could have run, but other threads had its CPU."""

    @property
    def busy(self) -> float:
        return (self.compute or 0.0) + self.data


@dataclass(frozen=True, slots=True)
class Straggler:
    """The slow ranks of a job."""

    processes: tuple[str, ...]
    """Such as ``rank-3``, the slowest first."""
    hosts: tuple[str, ...]
    whole_host: bool
    """Whether nearly all processes of ``hosts`` are slow, and each host has several."""
    slower: float
    """The slowest rank's extra busy time, as a fraction of the normal busy time."""
    cause: Cause
    """The likely cause for the slowest rank."""
    step: int
    """The last step that was judged; 0 without steps."""
    measured: Literal["steps", "network", "activity"] = "steps"
    """``steps``: how long each rank was busy. ``network``: all ranks wait long, and these hosts
    lose packets or have long round trips. ``activity``: no rank measures its steps, and these GPUs
    work less."""

    def is_news_after(self, shown: Straggler | None) -> bool:
        """Whether it is news for a user who has seen ``shown``."""
        if shown is None or self._who != shown._who:
            return True
        return shown.cause == "unknown" and self.cause != "unknown"

    @property
    def _who(self) -> frozenset[str]:
        return frozenset(self.hosts if self.whole_host else self.processes)

    def __str__(self) -> str:
        where = fold(list(self.hosts))
        if self.measured == "network" and self.cause == "far":
            slower = f"steps take up to {self.slower * 100:.0f} % longer"
            return f"{slower}: the network of {where} is slow"
        if self.measured == "network":
            verb = "loses" if len(self.hosts) == 1 else "lose"
            return (
                f"steps take {self.slower * 100:.0f} % longer than before: {where} {verb} packets"
                " on the network"
            )
        who = f"{name_processes(self.processes)} on {where}"
        who = f"the ranks of {where}" if self.whole_host else who
        verb = "is" if len(self.processes) == 1 else "are"
        up_to = "up to " if len(self.processes) > 1 else ""
        how = "slower" if self.measured == "steps" else "less active on the GPU"
        return (
            f"{who} {verb} {up_to}{self.slower * 100:.0f} % {how} than the others:"
            f" {CAUSES[self.cause]}"
        )


@dataclass(frozen=True, slots=True)
class _Excess:
    """How much longer than normal a rank was busy in one block."""

    slower: float
    seconds: float
    data: float
    queued: float
    slow: bool


@dataclass(slots=True)
class _Rank:
    host: str
    group: int
    last: int = -1
    """The last block that it sent."""
    slow: bool = False
    history: deque[_Excess] = field(default_factory=lambda: deque(maxlen=BLOCKS))

    @property
    def slower(self) -> float:
        return median(excess.slower for excess in self.history)

    def judge(self, excess: _Excess) -> None:
        self.history.append(excess)
        blocks = sum(one.slow for one in self.history)
        self.slow = blocks >= SLOW_BLOCKS or (self.slow and blocks > RECOVERED_BLOCKS)

    def measured_cause(self) -> Cause:
        extra = sum(excess.seconds for excess in self.history)
        if sum(excess.data for excess in self.history) > extra / 2:
            return "data"
        if sum(excess.queued for excess in self.history) > extra / 2:
            return "cpu"
        return "unknown"


def seen_cause(host: str, process: str, seen: Seen) -> Cause:
    """The likely cause of those that the telemetry shows for a process: the one that the fewest
    others show. A busy CPU slows all ranks of a host, a hot GPU only one."""
    others = Counter(chain.from_iterable(seen.values()))
    found = [cause for cause in CAUSES if cause in seen.get((host, process), ())]
    return min(found, key=lambda cause: others[cause], default="unknown")


def causes_seen(sample: Sample, job_gpus: Collection[int]) -> dict[str, set[Cause]]:
    """The causes that a host's telemetry shows, for each process, and for each of `gpus_of_ranks`.
    ``job_gpus``: indices of the GPUs that the job uses; empty means all."""
    own = sum(rank.cpu or 0.0 for rank in sample.ranks)
    cpus = sample.cpus or 0
    full = (sample.cpu or 0.0) > BUSY_CPUS * cpus > 0
    foreign = full and (sample.cpu or 0.0) - own > FOREIGN_CPUS * cpus
    of_host: set[Cause] = {"cpu"} if foreign else set()
    if (sample.losses or 0.0) >= MANY_LOSSES:
        of_host.add("network")
    seen: dict[str, set[Cause]] = {rank.process: {*of_host} for rank in sample.ranks}
    for process, gpu in gpus_of_ranks(sample, job_gpus):
        causes = seen.setdefault(process, {*of_host})
        if gpu.throttled:
            causes.add("clock")
        if gpu.others:
            causes.add("gpu")
    return seen


def gpus_of_ranks(sample: Sample, job_gpus: Collection[int]) -> list[tuple[str, GpuSample]]:
    """The GPUs of the job, each with its process; ``gpu-3`` if nobody knows which rank has it."""
    gpus = [gpu for gpu in sample.gpus if not job_gpus or gpu.index in job_gpus]
    ranks = sorted(sample.ranks, key=lambda rank: (len(rank.process), rank.process))
    if len(ranks) != len(gpus):
        return [(f"gpu-{gpu.index}", gpu) for gpu in gpus]
    return [(rank.process, gpu) for rank, gpu in zip(ranks, gpus, strict=True)]


def less_active(slow: Sequence[tuple[str, str, float]], seen: Seen) -> Straggler | None:
    """The result of `GpuActivity.slow`, with the likely cause for the slowest rank."""
    if not slow:
        return None
    process, host, slower = slow[0]
    return Straggler(
        processes=tuple(process for process, _, _ in slow),
        hosts=in_order(host for _, host, _ in slow),
        whole_host=False,
        slower=slower,
        cause=seen_cause(host, process, seen),
        step=0,
        measured="activity",
    )


class StragglerDetector:
    """The slow ranks of one attempt. ``world_size`` is the number of ranks."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._ranks: dict[str, _Rank] = {}
        self._waiting: dict[int, dict[str, Block]] = {}
        self._judged = -1
        """The last block that was judged."""
        self._waits: deque[tuple[float, float]] = deque(maxlen=USUAL)
        """Of the last blocks, the seconds of a step, and of the part in which all ranks wait."""
        self.knows_compute = False
        """Whether ranks measure how long they compute."""

    def add(self, process: str, host: str, group: int, block: Block) -> None:
        """Add a block of one rank. The blocks of a rank arrive in order."""
        known = self._ranks.get(process)
        if known is None and len(self._ranks) >= self._world_size:
            return  # a forged report
        if known is not None and block.number <= known.last:
            if self._judged < 0 or block.number >= self._judged - BLOCKS:
                return
            self._restart()  # the script has started to count again
        rank = self._ranks.setdefault(process, _Rank(host, group))
        rank.last, rank.group = block.number, group
        if block.number <= self._judged:
            return
        self._waiting.setdefault(block.number, {})[process] = block
        while self._waiting:
            oldest = min(self._waiting)
            complete = len(self._waiting[oldest]) >= self._world_size
            if not complete and len(self._waiting) <= MAX_WAITING:
                break
            self._judged = oldest
            self._judge(self._waiting.pop(oldest))

    def find(self, seen: Seen = MappingProxyType({})) -> Straggler | None:
        """The ranks that are slow now."""
        slow: list[str] = []
        for group in {rank.group for rank in self._ranks.values() if rank.slow}:
            members = {name: one for name, one in self._ranks.items() if one.group == group}
            found = [name for name, rank in members.items() if rank.slow]
            # If most ranks of a group are slow, they are its normal ranks, not stragglers.
            slow += found if len(found) * 2 <= len(members) else []
        if not slow:
            return self._with_bad_network(seen)
        slow.sort(key=lambda name: -self._ranks[name].slower)
        hosts = in_order(self._ranks[name].host for name in slow)
        on_hosts = [name for name, rank in self._ranks.items() if rank.host in hosts]
        worst = self._ranks[slow[0]]
        cause = worst.measured_cause()
        return Straggler(
            processes=tuple(slow),
            hosts=hosts,
            whole_host=len(on_hosts) * 3 <= len(slow) * 4 and len(slow) >= 2 * len(hosts),
            slower=round(worst.slower, 3),
            cause=seen_cause(worst.host, slow[0], seen) if cause == "unknown" else cause,
            step=(self._judged + 1) * STEPS,
        )

    def _with_bad_network(self, seen: Seen) -> Straggler | None:
        """The ranks whose hosts have a bad network, if all ranks wait longer than usual."""
        if len(self._waits) <= BLOCKS:
            return None
        hosts = len({rank.host for rank in self._ranks.values()})
        most = len(self._ranks) // 2
        cause: Cause = "network"
        ranks = self._that_show(cause, seen)
        if not ranks:
            cause = "far"
            ranks = self._that_show(cause, seen)
            most = len(self._ranks) if hosts == 2 else most
        if not 0 < len(ranks) <= most:
            return None
        part = self._waits_longer(lower_quartile(wait for _, wait in self._waits), LONGER)
        if part is None and cause == "far" and hosts > 2:
            part = self._waits_longer(0.0, LONG)  # it may have been slow from the start
        if part is None:
            return None
        return Straggler(
            processes=tuple(ranks),
            hosts=in_order(self._ranks[name].host for name in ranks),
            whole_host=True,
            slower=round(part / (1 - part), 3) if part < 1 else 1.0,
            cause=cause,
            step=(self._judged + 1) * STEPS,
            measured="network",
        )

    def _that_show(self, cause: Cause, seen: Seen) -> list[str]:
        return [
            name for name, rank in self._ranks.items() if cause in seen.get((rank.host, name), ())
        ]

    def _waits_longer(self, usual: float, limit: float) -> float | None:
        """The part of a step by which all ranks wait longer than ``usual`` seconds. None if it is
        at most ``limit`` in most of the last blocks."""
        recent = list(self._waits)[-BLOCKS:]
        longer = [(wait - usual) / step for step, wait in recent if step > 0]
        return median(longer) if sum(one > limit for one in longer) >= SLOW_BLOCKS else None

    def _restart(self) -> None:
        self._ranks, self._waiting, self._judged = {}, {}, -1
        self._waits.clear()

    def _judge(self, blocks: Mapping[str, Block]) -> None:
        waits = [block.step - block.busy for block in blocks.values() if block.compute is not None]
        if len(waits) == len(blocks):
            step = median(block.step for block in blocks.values())
            self.knows_compute = True
            self._waits.append((step, max(0.0, min(waits))))
        groups: dict[int, dict[str, Block]] = {}
        for process, block in blocks.items():
            groups.setdefault(self._ranks[process].group, {})[process] = block
        for group in groups.values():
            if len(group) < 2:
                continue
            busy = lower_quartile(block.busy for block in group.values())
            data = lower_quartile(block.data for block in group.values())
            queued = lower_quartile(block.queued for block in group.values())
            for process, block in group.items():
                extra = block.busy - busy
                normal = block.step if block.compute is None else busy
                slow = extra > SLOWER * normal and extra > LEAST_SHARE * block.step
                slower = extra / normal if normal > 0 else 0.0
                self._ranks[process].judge(
                    _Excess(slower, extra, block.data - data, block.queued - queued, slow)
                )


def lower_quartile(values: Iterable[float]) -> float:
    """What is normal among values of which some are too large."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 4]
