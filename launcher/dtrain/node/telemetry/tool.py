"""A GPU vendor's program, read without waiting."""

from __future__ import annotations

import contextlib
import os
import re
import signal

from dtrain.node.agent.processes import look, send
from dtrain.node.agent.sweep import HELPERS, await_ends, start_helper

FIELDS = (
    "index",
    "use",  # percent
    "memory_used",  # MiB
    "memory_total",
    "power",  # W
    "power_limit",
    "temperature",  # degrees Celsius
    "clock",  # MHz
    "clock_max",
    "slowed",  # NVML's bits of reasons for a lower clock
    "ecc",  # uncorrected errors since the boot
    "xids",  # Xid errors since the start of the run
    "memory_use",  # percent of the time in which memory was read or written
    "memory_clock",  # MHz
    "ecc_corrected",  # since the boot
    "others",  # processes outside this run
    "others_memory",  # MiB that these have
)
"""The values of a GPU, in the order of a sample."""
MAX_GPUS = 64
STALE = 10.0
"""Seconds after which a value of a tool that hangs is no longer shown."""
END_LIMIT = 0.5
"""Seconds to wait for the end of a killed tool: it may hang in the kernel."""


class Tool:
    """A program whose output is read without waiting."""

    def __init__(self, argv: list[str]) -> None:
        """Raises OSError."""
        self._process = start_helper(argv)
        self._proc = look(self._process.pid)
        assert self._process.stdout is not None
        self._fd = self._process.stdout.fileno()
        os.set_blocking(self._fd, False)
        self.ended = False

    def read(self) -> bytes:
        """What it has printed since the last call."""
        parts: list[bytes] = []
        while not self.ended and len(parts) < 16:
            try:
                part = os.read(self._fd, 1 << 16)
            except BlockingIOError:
                break
            parts.append(part)
            if not part:
                self._end()
        return b"".join(parts)

    def stop(self) -> None:
        """Kill it, and wait for its end. A process that hangs in the kernel stays."""
        if not self.ended:
            if self._proc is not None:
                send(self._proc, signal.SIGKILL)
                await_ends([self._proc], END_LIMIT)
            self._end()

    def _end(self) -> None:
        self.ended = True
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process.returncode = 0  # the supervisor reaps it
        HELPERS.discard(self._process.pid)


def number(text: str) -> float | None:
    """The number in a value; None for `[N/A]`, and for what no GPU has: a negative number, or the
    largest one of 64 bits. A bit mask is hexadecimal."""
    if text.startswith("0x"):
        with contextlib.suppress(ValueError):
            bits = int(text[:20], 16)
            return bits if bits < 1 << 64 else None
    found = re.search(r"(?<![\d.-])\d{1,15}(?!\d)(\.\d{1,6})?", text)
    if found is None:
        return None
    return float(found[0]) if found[1] else int(found[0])


def combined(bits: list[int]) -> int:
    found = 0
    for one in bits:
        found |= int(one)
    return found
