"""A run on a terminal: log lines scroll above a header that is redrawn in place."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dtrain.session.feed import StreamKey
from dtrain_cli.views import names
from dtrain_cli.views.bars import Bars
from dtrain_cli.views.header import BAD, Header
from dtrain_cli.views.outlet import Outlet
from dtrain_cli.views.plain import Plain

if TYPE_CHECKING:
    from dtrain.failures.cause import Report
    from dtrain.launchplan.plan import LaunchPlan
    from dtrain.runs.log_store import Stream
    from dtrain.runs.progress import Progress

_BETWEEN_WRITES = 0.05
_BETWEEN_CLOCKS = 1.0
_BUFFERED = 64 << 10
"""Characters; with so many buffered, write without waiting for more."""


class Live(Plain):
    """Shows the header on stderr. Each write erases it, prints, and redraws it.

    Between writes the cursor stays on an empty line above the header. So the next write erases an
    echoed ^C, a line of another process (an `ssh` of a ProxyCommand) stays whole, and resizing the
    terminal does not change the distance to the header's start. `rich.live` leaves the cursor at
    the end: an echo that wraps, or a narrower window, then leaves parts of the header behind.
    """

    def __init__(self, out: Outlet, err: Outlet, *, fold: bool, color: tuple[bool, bool]) -> None:
        # If both are one terminal, use one file descriptor, which keeps the order of all output.
        super().__init__(err if out.same_terminal(err) else out, err, fold=fold, color=color)
        self._bars = Bars(math.inf)  # The header shows them.
        self._header = Header()
        self._began = time.monotonic()
        self._drawn = False
        self._written = 0.0
        self._size = 0
        self._stale = False
        self._lowest: tuple[bool, int, str, int] | None = None
        self._reported = False

    def started(self, run: str, plan: LaunchPlan, folder: str) -> None:
        super().started(run, plan, folder)
        self._head(run, plan)

    def attached(self, run: str, plan: LaunchPlan, folder: str) -> None:
        super().attached(run, plan, folder)
        self._head(run, plan)

    def next_attempt(self, attempt: int, plan: LaunchPlan) -> None:
        super().next_attempt(attempt, plan)
        self._expect(plan)

    def allocated(self, plan: LaunchPlan) -> None:
        super().allocated(plan)
        self._expect(plan)

    def _head(self, run: str, plan: LaunchPlan) -> None:
        self._began = time.monotonic()
        self._header.run = run
        self._expect(plan)

    def _expect(self, plan: LaunchPlan) -> None:
        self._header.workers = plan.world_size
        self._header.hosts = {host.host.name: "" for host in plan.hosts}

    def host_state(self, host: str, state: str, detail: str) -> None:
        self._stale = True
        self._header.hosts[host] = state
        if state in BAD:
            super().host_state(host, state, detail)

    def progress(self, host: str, report: Progress) -> None:
        if self._progress_line.add(report):
            self._header.progress = ("", self._progress_line.text)
            self._stale = self._reported = True

    def lines(self, stream: Stream, lines: list[str], partial: str) -> None:
        super().lines(stream, lines, partial)
        order = (stream.rank is None, stream.rank or 0, stream.role, stream.index)
        if not self._reported and (self._lowest is None or order <= self._lowest):
            latest = partial if partial.strip() else next(filter(str.strip, reversed(lines)), "")
            if latest:
                self._lowest = order
                self._header.progress = (names.prefix(stream.host, stream.label), latest)
                self._stale = True

    def flush(self, now: float) -> None:
        self._fold(now)
        if self._size >= _BUFFERED or self._next_draw(now) <= 0:
            self._draw(now)

    def next_flush(self, now: float) -> float | None:
        folded = super().next_flush(now)
        draw = max(0.0, self._next_draw(now))
        return draw if folded is None else min(draw, folded)

    def suspend(self) -> None:
        self._write(self._erase(), "")
        self._size, self._stale = 0, True

    def finished(self, report: Report, paths: Mapping[StreamKey, str]) -> None:
        self.suspend()
        super().finished(report, paths)

    def _next_draw(self, now: float) -> float:
        fresh = not self._buffer and not self._stale
        return self._written + (_BETWEEN_CLOCKS if fresh else _BETWEEN_WRITES) - now

    def _draw(self, now: float) -> None:
        columns, rows = self._err.size()
        lines = self._header.lines(columns, rows, now - self._began)
        if lines and self._color["stderr"]:
            lines[0] = names.paint(lines[0], "dim")
        erase, self._drawn = self._erase(), bool(lines)
        header = "".join(f"\n{line}" for line in lines)
        self._write(erase, f"{header}\r\x1b[{len(lines)}A" if lines else "")
        self._written, self._size, self._stale = now, 0, False

    def _erase(self) -> str:
        drawn, self._drawn = self._drawn, False
        return "\r\x1b[J" if drawn else ""

    def _put(self, fd: str, text: str) -> None:
        super()._put(fd, text)
        self._size += len(text)
