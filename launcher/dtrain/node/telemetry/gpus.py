"""The GPUs of this host, from their vendor's tool."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time

from dtrain.node.agent.kernel_log import NO_RUN
from dtrain.node.agent.processes import look, send
from dtrain.node.agent.sweep import HELPERS, start_helper

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

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
)
NVIDIA = (
    "index,pci.bus_id,utilization.gpu,memory.used,memory.total,power.draw,power.limit,"
    "temperature.gpu,clocks.sm,clocks.max.sm,clocks_throttle_reasons.active,"
    "ecc.errors.uncorrected.volatile.total"
)
OLD_NVIDIA = "index,pci.bus_id,utilization.gpu,memory.used,memory.total,power.draw,power.limit"
"""Fields that every driver knows."""
MAX_GPUS = 64
MAX_LINE = 4096
STALE = 10.0
"""Seconds after which a value of a tool that hangs is no longer shown."""
BETWEEN_STARTS = 60.0
"""Minimum seconds between two starts of a tool that exits."""
ROCM = ["--showuse", "--showmeminfo", "vram", "--showpower", "--showmaxpower", "--showtemp"]
ROCM += ["--showclocks", "--json"]
ROCM_PAUSE = 20.0
"""Seconds between two runs of rocm-smi, which takes half a second of a core."""


class Tool:
    """A program whose output is read without waiting."""

    def __init__(self, argv: list[str]) -> None:
        """Raises OSError."""
        import subprocess

        # Without the run's tag, because a sweep ends all tagged processes.
        environment = {**os.environb, **NO_RUN.environment, b"LC_ALL": b"C"}
        self._process = start_helper(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
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
        """Kill it. A process that hangs in the kernel stays."""
        if not self.ended:
            if self._proc is not None:
                send(self._proc, signal.SIGKILL)
            self._end()

    def _end(self) -> None:
        self.ended = True
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process.returncode = 0  # the supervisor reaps it
        HELPERS.discard(self._process.pid)


class Nvidia:
    """A running nvidia-smi that prints a line for each GPU every second."""

    def __init__(self, program: str) -> None:
        self._program = program
        self._fields = NVIDIA
        self._tool: Tool | None = None
        self._next_start = 0.0
        self._rest = b""
        self._heard = False
        self._rows: dict[int, tuple[float, str, list[Any]]] = {}

    def read(self, xids: dict[str, int]) -> list[list[Any]]:
        now = time.monotonic()
        if self._tool is None or self._tool.ended:
            self._start(now)
        if self._tool is not None:
            *lines, rest = (self._rest + self._tool.read()).split(b"\n")
            self._rest = rest[:MAX_LINE]
            for line in lines:
                self._take(now, line)
        return [
            [*row, xids.get(bus, 0)]
            for _, (then, bus, row) in sorted(self._rows.items())
            if now - then < STALE
        ]

    def _start(self, now: float) -> None:
        if self._tool is not None and not self._heard and self._fields == NVIDIA:
            self._fields, self._next_start = OLD_NVIDIA, 0.0  # it may know fewer fields
        if now < self._next_start:
            return
        self._next_start = now + BETWEEN_STARTS
        self._rest, self._heard = b"", False
        options = ["--query-gpu=" + self._fields, "--format=csv,noheader,nounits", "-l", "1"]
        with contextlib.suppress(OSError):
            self._tool = Tool([self._program, *options])

    def _take(self, now: float, line: bytes) -> None:
        words = [word.strip() for word in line[:MAX_LINE].decode("ascii", "replace").split(",")]
        if len(words) != self._fields.count(",") + 1 or not words[0].isdigit():
            return
        index = int(words[0][:9])
        if index not in self._rows and len(self._rows) >= MAX_GPUS:
            return
        values = [number(word) for word in words[2:]]
        values += [None] * (len(FIELDS) - 2 - len(values))
        self._heard = True
        self._rows[index] = now, bus_of(words[1]), [index, *values]

    def stop(self) -> None:
        if self._tool is not None:
            self._tool.stop()


class Rocm:
    """Runs rocm-smi now and then: it has no mode that keeps printing."""

    def __init__(self, program: str) -> None:
        self._program = program
        self._tool: Tool | None = None
        self._next_start = 0.0
        self._output = b""
        self._rows: list[list[Any]] = []
        self._then = 0.0

    def read(self, _xids: dict[str, int]) -> list[list[Any]]:
        now = time.monotonic()
        if self._tool is not None and not self._tool.ended:
            self._output = (self._output + self._tool.read())[: 1 << 20]
            if self._tool.ended:
                self._rows, self._then = rocm_rows(self._output), now
            elif now >= self._next_start:
                self._tool.stop()
        elif now >= self._next_start:
            self._next_start, self._output = now + ROCM_PAUSE, b""
            with contextlib.suppress(OSError):
                self._tool = Tool([self._program, *ROCM])
        return self._rows if now - self._then < ROCM_PAUSE + STALE else []

    def stop(self) -> None:
        if self._tool is not None:
            self._tool.stop()


def rocm_rows(output: bytes) -> list[list[Any]]:
    """A row for each card in the JSON that rocm-smi prints."""
    try:
        table = json.loads(output[output.find(b"{") :])
        cards = {int(name[4:]): card for name, card in table.items() if CARD.fullmatch(name)}
        return [rocm_row(index, cards[index]) for index in sorted(cards)[:MAX_GPUS]]
    except (ValueError, AttributeError, RecursionError):
        return []


CARD = re.compile(r"card\d{1,4}")


def rocm_row(index: int, card: dict[str, Any]) -> list[Any]:
    words = {name.lower(): str(value) for name, value in card.items()}

    def value(pattern: str) -> float | None:
        found = (number(words[name]) for name in words if re.search(pattern, name))
        return next((one for one in found if one is not None), None)

    used, total = value(r"vram total used memory"), value(r"vram total memory")
    return [
        index,
        value(r"gpu use \(%\)"),
        None if used is None else int(used) >> 20,
        None if total is None else int(total) >> 20,
        value(r"^(average|current).*power \(w\)"),
        value(r"^max.*power \(w\)"),
        value(r"temperature \(sensor junction\)") or value(r"temperature"),
        value(r"sclk clock speed"),
        None,
        None,
        None,
        0,
    ]


def number(text: str) -> float | None:
    """The number in a value; None for `[N/A]`. A bit mask is hexadecimal."""
    if text.startswith("0x"):
        with contextlib.suppress(ValueError):
            return int(text[:20], 16)
    found = re.search(r"-?\d{1,15}(\.\d{1,6})?", text)
    if found is None:
        return None
    return float(found[0]) if found[1] else int(found[0])


def bus_of(text: str) -> str:
    """A PCI address as the kernel writes it: ``0000:3b:00``."""
    return text.lower()[-12:].partition(".")[0]


def gpu_tool() -> Nvidia | Rocm | None:
    """The tool of this host's GPUs, if it has one."""
    for name, kind in (("nvidia-smi", Nvidia), ("rocm-smi", Rocm)):
        for folder in os.environ.get("PATH", "").split(":"):
            path = os.path.join(folder, name)
            if folder.startswith("/") and os.access(path, os.X_OK) and os.path.isfile(path):
                return kind(path)
    return None
