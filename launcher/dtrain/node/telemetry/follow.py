"""Reads the telemetry files of a run for the relay."""

from __future__ import annotations

import os
import time

from dtrain.node.agent.worker_files import Lines, decode, read_regular, size_of
from dtrain.node.telemetry.files import MAX_NOW, MAX_STORED, NOW, STORED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Iterator

    from dtrain.node.agent.wire import Json

PAUSE = 0.5
"""Seconds between two reads."""
AT_ONCE = 25
"""Stored averages sent after one read, so that a long history does not delay other messages."""


class TelemetryFiles:
    """The samples of a run's folder. Any process of the job can write to these files."""

    def __init__(self, folder: bytes, after: float) -> None:
        """``after``: the time of the last average that the launcher has, rounded up to seconds."""
        self._now = os.path.join(folder, NOW)
        self._stored = os.path.join(folder, STORED)
        self._after = after
        self._lines: Lines | None = None
        self._waiting: list[Json] = []
        self._shown = b""
        self._due = 0.0

    def read(self, over: bool) -> Iterator[tuple[str, Json]]:
        """New samples, each with its type: ``sample`` or ``average``. ``over``: no more follow."""
        now = time.monotonic()
        if now < self._due and not over:
            return
        self._due = now + PAUSE
        line = read_regular(self._now, MAX_NOW) or b""
        if line != self._shown and line.endswith(b"\n"):
            self._shown = line
            sample = decode(line)
            if sample is not None:
                yield "sample", sample
        # It is shorter after the older half was dropped.
        if self._lines is None or size_of(self._stored) < self._lines.offset:
            self._lines = Lines(self._stored, unsent(self._stored, self._after), MAX_NOW)
        if not self._waiting:
            self._waiting = [body for line, _ in self._lines.read() for body in average_in(line)]
            self._after = self._waiting[-1]["time"] if self._waiting else self._after
        count = len(self._waiting) if over else AT_ONCE
        for body in self._waiting[:count]:
            yield "average", body
        del self._waiting[:count]


def average_in(line: bytes | None) -> list[Json]:
    body = decode(line) if line is not None else None
    return [body] if body is not None and isinstance(body.get("time"), (int, float)) else []


def unsent(path: bytes, after: float) -> int:
    """The offset in a file of the averages that the launcher lacks: after the last one of the
    second that ends at ``after``, or 0 if there is none. Later averages may have earlier times: a
    clock may be set back."""
    found, lines = 0, Lines(path, 0, MAX_NOW)
    while after > 0 and lines.offset <= MAX_STORED:
        begun = lines.offset
        for line, end in lines.read():
            if any(after - 1 <= body["time"] <= after for body in average_in(line)):
                found = end
        if lines.offset == begun:
            break
    return found
