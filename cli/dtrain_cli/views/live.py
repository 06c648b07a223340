"""A run on a terminal: a dashboard with the last lines of output below it."""

from __future__ import annotations

import math
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

from rich.text import Text

from dtrain.diagnostics import DtrainError
from dtrain.framing import clean
from dtrain.runs import events
from dtrain.runs.log_store import Stream
from dtrain.runs.record import Record
from dtrain.runs.status import age
from dtrain_cli.views import names
from dtrain_cli.views.bars import Bars
from dtrain_cli.views.board import Board
from dtrain_cli.views.canvas import ENTER, LEAVE, frame
from dtrain_cli.views.dashboard import draw
from dtrain_cli.views.outlet import Outlet
from dtrain_cli.views.plain import Plain

ENTER_AFTER = 1.0
"""Seconds that all hosts are connected before the dashboard appears."""
_BETWEEN_DRAWS = 0.25
_BETWEEN_CLOCKS = 1.0
_KEPT = 256 << 10
"""Characters of output that are printed after the dashboard is gone."""
_RECENT = 200
"""Lines: the height of a large terminal."""


class Live(Plain):
    """Prints plain lines until all hosts are connected: before that, other programs such as `ssh`
    may ask questions on the terminal. Then it shows the dashboard on the alternate screen, so that
    nothing of it stays in the scrollback. At the end it prints the last lines of output there."""

    def __init__(
        self, out: Outlet, err: Outlet, *, fold: bool, timestamps: bool, color: tuple[bool, bool]
    ) -> None:
        # If both are one terminal, use one file descriptor, which keeps the order of all output.
        out = err if out.same_terminal(err) else out
        super().__init__(out, err, fold=fold, timestamps=timestamps, color=color)
        self._bars = Bars(math.inf)  # The dashboard shows them.
        self._board = Board()
        self._entered = False
        self._connected: float | None = None
        self._kept: deque[str] = deque()
        self._kept_size = 0
        self._cut = False
        self._recent: deque[str] = deque(maxlen=_RECENT)
        self._partial = ""
        self._drawn = 0.0
        self._size = (0, 0)
        self._stale = True

    def on_event(self, event: events.RunEvent) -> None:
        if not isinstance(event, events.ProgressReported):  # the dashboard has it
            super().on_event(event)
        match event:
            case events.RunLaunched():
                self._board.began = time.monotonic()
            case events.RunAttached(folder=folder):
                self._board.began = time.monotonic()
                with suppress(DtrainError):
                    self._board.began -= age(Record.load(Path(folder)).started)
        self._stale |= self._board.on_event(event, time.monotonic())

    def lines(self, stream: Stream, text: str, partial: str, second: int | None) -> None:
        super().lines(stream, text, partial, second)
        self._partial = names.prefix(stream.host, stream.label) + partial if partial.strip() else ""
        self._stale = True

    def flush(self, now: float) -> None:
        self._fold(now)
        if not self._entered and self._may_enter(now):
            self._write("", ENTER)
            self._entered = self._stale = True
        self._write("", "")
        if self._entered and self._is_due(now):
            self._draw(now)

    def next_flush(self, now: float) -> float | None:
        pauses = [super().next_flush(now)]
        if self._entered:
            # A draw also notices a new size of the terminal.
            pauses.append(max(0.0, self._drawn + _BETWEEN_DRAWS - now))
        elif self._connected is not None:
            pauses.append(max(0.0, self._connected + ENTER_AFTER - now))
        return min((pause for pause in pauses if pause is not None), default=None)

    def suspend(self) -> None:
        if self._entered:
            self._entered = False
            if self._cut:
                self._cut = False
                hint = f"`dtrain logs {self._board.run}` shows earlier output"
                self._kept.appendleft(f"dtrain: {hint}\n")
            self._buffer.append((self._err, LEAVE + "".join(self._kept)))
            self._kept.clear()
            self._kept_size = 0
        super().suspend()

    def _may_enter(self, now: float) -> bool:
        if not self._board.connected:
            self._connected = None
            return False
        if self._connected is None:
            self._connected = now
        return now >= self._connected + ENTER_AFTER

    def _is_due(self, now: float) -> bool:
        if now < self._drawn + _BETWEEN_DRAWS:
            return False
        clock = now >= self._drawn + _BETWEEN_CLOCKS
        return clock or self._stale or self._err.size() != self._size

    def _draw(self, now: float) -> None:
        self._size = columns, rows = self._err.size()
        self._drawn, self._stale = now, False
        recent = list(self._recent)[-rows:]
        if self._partial:
            recent.append(clean(self._partial))
        output = [self._text(line) for line in recent]
        lines = draw(self._board, output, columns, rows, now)
        self._write("", frame(lines, columns, color=self._color["stderr"]))

    def _text(self, line: str) -> Text:
        line = line.expandtabs(4)
        return Text.from_ansi(line) if self._color["stderr"] else Text(line)

    def _put(self, fd: str, text: str) -> None:
        outlet = self._out if fd == "stdout" else self._err
        self._recent.extend(text.removesuffix("\n").rsplit("\n", _RECENT)[-_RECENT:])
        self._stale = True
        if not self._entered or not outlet.terminal:
            super()._put(fd, text)
            return
        self._kept.append(text)
        self._kept_size += len(text)
        while self._kept_size > _KEPT and len(self._kept) > 1:
            self._kept_size -= len(self._kept.popleft())
            self._cut = True
