"""Finds the progress that workers print, see ``job.progress``."""

from __future__ import annotations

import re
import threading
import time
from typing import Any

from dtrain.launchplan.plan import LaunchPlan
from dtrain.runs.log_store import Stream
from dtrain.runs.progress import speaker
from dtrain.session.watching.reports import ProgressReports
from dtrain.spec.progress_line import PrintedLine

MAX_LINE = 1024
"""Bytes of a line that are searched, and of an unfinished line that are kept."""
MAX_PIECE = 1 << 16
"""Bytes at the end of new output that are searched."""
_LINE_END = re.compile(rb"[\r\n]")
_COLOR = re.compile(r"\x1b\[[0-9;:]{0,64}m")


class PrintedProgress:
    """The progress in the output of one attempt. Threads may call it at the same time.

    Several workers may print: the lowest rank among them counts for the job. Nothing that is
    printed counts once a worker reports its progress through `dtrain.runtime`.
    """

    def __init__(self, plan: LaunchPlan, reports: ProgressReports) -> None:
        self._reports = reports
        wanted = plan.job.progress
        self._line = None if wanted is None else PrintedLine(wanted.line)
        self._total = None if wanted is None else wanted.total
        self._file = f"{speaker(plan)}.progress"
        self._unfinished: dict[tuple[str, str], bytes] = {}
        self._first: tuple[bool, int, str] | None = None
        """The worker that counts."""
        self._lock = threading.Lock()

    def add(self, stream: Stream, piece: bytes) -> None:
        """Report the last line of progress in new output of a worker, if it has one, as
        `dtrain.runtime` would."""
        if self._line is None or self._reports.told:
            return
        index = stream.index if stream.rank is None else stream.rank
        worker = stream.role == "evaluator", index, stream.label
        with self._lock:
            if self._first is not None and worker > self._first:
                return
            found = self._last(self._line, stream, piece)
            if found is None:
                return
            self._first = worker
            if found["total"] is None:
                found["total"] = self._total
            fields = {"event": "progress", "time": time.time(), "tokens": None, **found}
            self._reports.add(stream.host, self._file, fields, printed=True)

    def _last(self, wanted: PrintedLine, stream: Stream, piece: bytes) -> dict[str, Any] | None:
        key = stream.label, stream.fd
        text = self._unfinished.pop(key, b"") + piece
        *lines, rest = _LINE_END.split(text[-MAX_PIECE:])
        if rest:
            self._unfinished[key] = rest[-MAX_LINE:]
        for line in reversed(lines):
            plain = _COLOR.sub("", line[:MAX_LINE].decode(errors="replace"))
            if (found := wanted.read(plain)) is not None:
                return found
        return None
