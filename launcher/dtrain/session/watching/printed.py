"""Finds the progress that workers print, see ``job.progress``."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from typing import Any

from dtrain.launchplan.plan import LaunchPlan
from dtrain.runs.log_store import Stream
from dtrain.runs.progress import speaker
from dtrain.spec.progress_line import PrintedLine

MAX_LINE = 1024
"""Bytes of a line that are searched, and of an unfinished line that are kept."""
MAX_PIECE = 1 << 16
"""Bytes at the end of new output that are searched."""
_LINE_END = re.compile(rb"[\r\n]")
_COLOR = re.compile(r"\x1b\[[0-9;:]{0,64}m")


class PrintedProgress:
    """The progress in the output of one attempt. Threads may call it at the same time.

    Several workers may print: the lowest rank among them counts for the job.
    """

    def __init__(self, plan: LaunchPlan, report: Callable[[str, str, Any], object]) -> None:
        """``report`` gets what it finds: see `ProgressReports.add`."""
        self._report = report
        wanted = plan.job.progress
        self._lines = [] if wanted is None else [PrintedLine(line) for line in wanted.line]
        self._total = None if wanted is None else wanted.total
        self._file = f"{speaker(plan)}.progress"
        self._unfinished: dict[tuple[str, str], bytes] = {}
        self._first: tuple[bool, int, str] | None = None
        """The worker that counts."""
        self._known: dict[str, int | float] = {}
        """The last numbers that it has printed."""
        self._time = 0.0
        """When it printed the step: a later line with the loss must not change the rate."""
        self._lock = threading.Lock()

    def add(self, stream: Stream, piece: bytes) -> None:
        """Report the last numbers in new output of a worker, if it has some, as `dtrain.runtime`
        would."""
        if not self._lines:
            return
        index = stream.index if stream.rank is None else stream.rank
        worker = stream.role == "evaluator", index, stream.label
        with self._lock:
            if self._first is not None and worker > self._first:
                return
            found = self._last(stream, piece)
            if worker != self._first:
                if "step" not in found:
                    return
                self._first, self._known = worker, {}
            if not found:
                return
            self._known |= found
            if "step" in found:
                self._time = time.time()
            known = {"total": self._total, **self._known}
            fields = {name: known.pop(name, None) for name in ("step", "total", "loss")}
            report = {"event": "progress", "time": self._time, "tokens": None, "metrics": known}
            self._report(stream.host, self._file, {**report, **fields, "printed": True})

    def _last(self, stream: Stream, piece: bytes) -> dict[str, int | float]:
        """The last numbers of each kind of line."""
        key = stream.label, stream.fd
        text = self._unfinished.pop(key, b"") + piece
        *lines, rest = _LINE_END.split(text[-MAX_PIECE:])
        if rest:
            self._unfinished[key] = rest[-MAX_LINE:]
        found: dict[str, int | float] = {}
        wanted = self._lines
        for line in reversed(lines):
            plain = _COLOR.sub("", line[:MAX_LINE].decode(errors="replace"))
            read = [(one, numbers) for one in wanted if (numbers := one.read(plain)) is not None]
            for one, numbers in read:
                found = {**numbers, **found}
                wanted = [other for other in wanted if other is not one]
            if not wanted:
                break
        return found
