"""NVIDIA's GPUs, from nvidia-smi."""

from __future__ import annotations

import contextlib
import os
import time

from dtrain.node.agent.processes import look
from dtrain.node.telemetry.tool import MAX_GPUS, STALE, Tool, number

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

    Own = Callable[[int], "bool | None"]

NVIDIA = (
    "index,pci.bus_id,utilization.gpu,memory.used,memory.total,power.draw,power.limit,"
    "temperature.gpu,clocks.sm,clocks.max.sm,clocks_throttle_reasons.active,"
    "ecc.errors.uncorrected.volatile.total,"
    "utilization.memory,clocks.mem,ecc.errors.corrected.volatile.total"
)
OLD_NVIDIA = "index,pci.bus_id,utilization.gpu,memory.used,memory.total,power.draw,power.limit"
"""Fields that every driver knows."""
AT_XIDS = 11
"""Where a row gets the number of Xid errors."""
PROCESSES = "gpu_bus_id,pid,used_gpu_memory"
PROCESS_PERIOD = 5
"""Seconds between two lists of processes."""
NONE = [0, 0]
MAX_PROCESSES, MAX_DEPTH = 1024, 64
MAX_LINE = 4096
BETWEEN_STARTS = 60.0
"""Minimum seconds between two starts of a tool that exits."""


class Query:
    """An nvidia-smi that keeps printing rows of values. It is started again if it exits."""

    def __init__(self, program: str, query: str, seconds: int) -> None:
        """``seconds``: between two tables."""
        self._argv = [program, query, "--format=csv,noheader,nounits", "-l", str(seconds)]
        self._tool: Tool | None = None
        self._next_start = 0.0
        self._rest = b""

    @property
    def ended(self) -> bool:
        """Whether it was started and has exited."""
        return self._tool is not None and self._tool.ended

    def rows(self, now: float) -> list[list[str]]:
        """The rows that it has printed since the last call."""
        if (self._tool is None or self._tool.ended) and now >= self._next_start:
            self._next_start = now + BETWEEN_STARTS
            self._rest = b""
            with contextlib.suppress(OSError):
                self._tool = Tool(self._argv)
        if self._tool is None:
            return []
        *lines, rest = (self._rest + self._tool.read()).split(b"\n")
        self._rest = rest[:MAX_LINE]
        texts = [line[:MAX_LINE].decode("ascii", "replace") for line in lines]
        return [[word.strip() for word in text.split(",")] for text in texts]

    def stop(self) -> None:
        if self._tool is not None:
            self._tool.stop()


class Nvidia:
    """The GPUs of this host, which nvidia-smi prints every second."""

    def __init__(self, program: str, own: Own) -> None:
        self._program = program
        self._fields = NVIDIA
        self._query = Query(program, "--query-gpu=" + NVIDIA, 1)
        self._heard = False
        self._rows: dict[int, tuple[float, str, list[Any]]] = {}
        self._processes = GpuProcesses(program, own)

    def read(self, xids: dict[str, int]) -> list[list[Any]]:
        now = time.monotonic()
        if self._query.ended and not self._heard and self._fields == NVIDIA:
            self._fields = OLD_NVIDIA  # it may know fewer fields
            self._query = Query(self._program, "--query-gpu=" + OLD_NVIDIA, 1)
        for words in self._query.rows(now):
            self._take(now, words)
        others = self._processes.others(now)
        return [
            [*row[:AT_XIDS], xids.get(bus, 0), *row[AT_XIDS:], *others.get(bus, NONE)]
            for _, (then, bus, row) in sorted(self._rows.items())
            if now - then < STALE
        ]

    def _take(self, now: float, words: list[str]) -> None:
        if len(words) != self._fields.count(",") + 1 or not words[0].isdigit():
            return
        index = int(words[0][:9])
        if index not in self._rows and len(self._rows) >= MAX_GPUS:
            return
        values = [number(word) for word in words[2:]]
        values += [None] * (NVIDIA.count(",") - 1 - len(values))
        self._heard = True
        self._rows[index] = now, bus_of(words[1]), [index, *values]

    def stop(self) -> None:
        self._processes.stop()
        self._query.stop()


class GpuProcesses:
    """The processes that use each GPU, which nvidia-smi prints every few seconds."""

    def __init__(self, program: str, own: Own) -> None:
        """``own``: whether a process is marked as one of the run."""
        self._own = own
        self._query = Query(program, "--query-compute-apps=" + PROCESSES, PROCESS_PERIOD)
        self._seen: dict[tuple[str, int], tuple[float, float]] = {}
        """When a process was last on a GPU, and the MiB of its memory there."""

    def others(self, now: float) -> dict[str, list[float]]:
        """By PCI address: how many processes outside this run use the GPU, and their MiB."""
        for words in self._query.rows(now):
            self._take(now, words)
        recent = now - 2.5 * PROCESS_PERIOD
        self._seen = {key: seen for key, seen in self._seen.items() if seen[0] > recent}
        found: dict[str, list[float]] = {}
        for (bus, _), (_, memory) in self._seen.items():
            count, sum_of = found.get(bus, NONE)
            found[bus] = [count + 1, sum_of + memory]
        return found

    def _take(self, now: float, words: list[str]) -> None:
        if len(words) != 3 or not words[1].isdigit():
            return
        key = bus_of(words[0]), int(words[1][:9])
        self._seen.pop(key, None)
        if len(self._seen) < MAX_PROCESSES and is_foreign(key[1], self._own):
            self._seen[key] = now, number(words[2]) or 0

    def stop(self) -> None:
        self._query.stop()


def is_foreign(pid: int, own: Own) -> bool:
    """Whether neither a process of this host nor an ancestor of it belongs to the run."""
    me, ancestor = os.getpid(), look(pid)
    for _ in range(MAX_DEPTH):
        if ancestor is None or ancestor.pid == me or own(ancestor.pid):
            return False
        if ancestor.ppid <= 1:
            return True
        ancestor = look(ancestor.ppid)
    return True


def bus_of(text: str) -> str:
    """A PCI address as the kernel writes it: ``0000:3b:00``."""
    return text.lower()[-12:].partition(".")[0]
