"""Reads the reports that workers write through `dtrain.runtime`: lines of JSON in files.

Any process of the job can write to these files.
"""

from __future__ import annotations

import os
import re

from dtrain.node.agent.wire import shown
from dtrain.node.agent.worker_files import Lines, decode, last_line, read_regular
from dtrain.node.files import listed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Iterator

    from dtrain.node.agent.wire import Json

MAX_REPORT = 16 << 10
"""Bytes of one line."""
MAX_PROGRESS_FILES = 4096
SEARCHED = 64 << 10
"""Bytes before the last report that are searched for the last progress."""
PROGRESS_FILE = rb"(?:rank|chief|worker|ps|evaluator)-\d{1,6}\.progress"
KINDS = ("progress", "steps", "tensorboard")


def report_in(line: bytes | None) -> Json | None:
    """The report in one line; None for anything else. The launcher checks its fields."""
    body = decode(line) if line is not None else None
    return body if body is not None and body.get("event") in KINDS else None


class ProgressFiles:
    """The progress files of a run's folder, read from ``offsets`` on."""

    def __init__(self, folder: bytes, offsets: Json, attached: bool) -> None:
        self._folder, self._offsets, self._attached = folder, offsets, attached
        self._followed: dict[bytes, Lines] = {}
        self._reported: set[bytes] = set()
        self.notices: list[str] = []
        """Problems with the files, each reported once."""
        self.advanced = False
        """Whether the last `read` found new data, valid or not. There may be more."""

    def read(
        self, over: bool = False, names: list[bytes] | None = None
    ) -> Iterator[tuple[str, int, Json]]:
        """The new reports: file name, offset of the next line, and fields. ``names``: of the files
        in the folder, for a caller that has just listed it.

        If the run is ``over``, only the last reports matter: skip to the end of large files.
        """
        self.advanced = False
        for file in listed(self._folder) if names is None else names:
            if not re.fullmatch(PROGRESS_FILE, file):
                continue
            path = os.path.join(self._folder, file)
            lines = self._followed.get(file)
            if lines is None:
                if len(self._followed) >= MAX_PROGRESS_FILES:
                    continue
                start = self._offsets.get(shown(file), 0)
                if shown(file) not in self._offsets and self._attached:
                    # A launcher that attaches needs the current state, not the history.
                    start = last_line(path, MAX_REPORT)
                    yield from self._earlier(file, path, start)
                lines = self._followed[file] = Lines(path, start, MAX_REPORT)
            if over:
                lines.skip_to_last(path)
            dropped, begun = 0, lines.offset
            found = lines.read()
            self.advanced |= lines.offset > begun
            for line, end in found:
                report = report_in(line)
                if report is not None:
                    yield shown(file), end, report
                else:
                    dropped += 1
            if dropped and file not in self._reported:
                self._reported.add(file)
                self.notices.append(
                    "%s: dropped %d line%s that dtrain.runtime does not write (too long, or not a"
                    " report)" % (shown(file), dropped, "s" if dropped > 1 else "")
                )

    def _earlier(self, file: bytes, path: bytes, start: int) -> Iterator[tuple[str, int, Json]]:
        """What still counts of the reports before ``start``: each TensorBoard in the first MiB, and
        the last progress."""
        begun = read_regular(path, min(start, 1 << 20)) or b""
        for line in begun.split(b"\n"):
            report = report_in(line) if b"tensorboard" in line and len(line) <= MAX_REPORT else None
            if report is not None and report["event"] == "tensorboard":
                yield shown(file), start, report
        end = max(0, start - SEARCHED)
        for line in reversed((read_regular(path, start - end, end) or b"").split(b"\n")):
            report = report_in(line) if b"progress" in line and len(line) <= MAX_REPORT else None
            if report is not None and report["event"] == "progress":
                yield shown(file), start, report
                return
