"""`dtrain top`: what the hosts and GPUs of running jobs do."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from dtrain.diagnostics import ExitCode
from dtrain.engines import existing
from dtrain.failures.cause import Report
from dtrain.framing import clean
from dtrain.runs.events import RunEvent
from dtrain.runs.folder import RunFolder
from dtrain.runs.record import Record
from dtrain.runs.status import active, age, find_run
from dtrain.session.caller import Caller
from dtrain.session.reporting.follow import RunFollower
from dtrain.session.reporting.observer import Observer
from dtrain.session.stopping.signals import on_signals
from dtrain_cli import completion, output
from dtrain_cli.commands.watch import Watch, suspendable
from dtrain_cli.parameters import RUN_HELP, argument
from dtrain_cli.views import Display, can_redraw, color
from dtrain_cli.views.names import duration
from dtrain_cli.views.outlet import Outlet

if TYPE_CHECKING:
    from dtrain_cli.views.board import Board

BETWEEN_SEARCHES = 5.0
"""Seconds between two searches for new runs."""


def top(
    run: Annotated[
        str | None, argument(f"{RUN_HELP} Default: all active runs.", "RUN", completion.open_runs)
    ] = None,
) -> None:
    """Show what the hosts and GPUs of running jobs do."""
    names = _active() if run is None else [find_run(run).name]
    if not names:
        output.write("no active runs; `dtrain ps --all` lists all runs\n")
        return
    out = Outlet(sys.stdout)
    alone = len(names) == 1
    # A run without a launcher does not change; of several runs, some may.
    changes = not alone or RunFolder.find(names[0]).in_charge() is not None
    if not (changes and can_redraw(out.terminal) and out.unicode):
        output.write("\n".join(_present(name, _ShownRun(name)) for name in names))
    elif alone:
        watch = Watch(stopping=False, display=Display.LIVE)
        code = watch.until_over(
            lambda: existing.watch(RunFolder.find(names[0]), Caller(watch.view, watch.control))
        )
        raise typer.Exit(ExitCode.OK if watch.control.left else code)
    else:
        _show_all(out)


def _active() -> list[str]:
    return [one.run for one in active() if not one.unreadable]


def _present(name: str, run: _ShownRun) -> str:
    """The present state of a run as text."""
    from dtrain_cli.views.dashboard import snapshot
    from dtrain_cli.views.overview import attach_hint

    if run.report is not None:
        return _ended(name, run.report)
    if not run.board.attended:
        asks = f"`dtrain ps {name}` asks its hosts for its state"
        return f" {name} has no launcher: {asks}, and {attach_hint(name)}\n"
    return snapshot(run.board, time.monotonic())


def _ended(name: str, report: Report) -> str:
    why = clean(report.reason)
    return (
        f" {name} is over, after {duration(report.seconds)}: {why}\n"
        f" `dtrain report {name}` shows where its time went, `dtrain logs {name}` its output\n"
    )


def _show_all(out: Outlet) -> None:
    """Draw all active runs until Ctrl-C."""
    from dtrain_cli.views.canvas import ENTER, LEAVE, frame
    from dtrain_cli.views.overview import draw

    leaving = threading.Event()
    followed: dict[str, _ShownRun] = {}
    search_at = 0.0

    @contextmanager
    def away() -> Iterator[None]:
        out.write(LEAVE)
        yield
        out.write(ENTER)

    out.write(ENTER)
    try:
        with on_signals(lambda number: leaving.set()), suspendable(away):
            while not leaving.is_set():
                now = time.monotonic()
                if now >= search_at:
                    search_at = now + BETWEEN_SEARCHES
                    followed = {name: followed.get(name) or _ShownRun(name) for name in _active()}
                for one in followed.values():
                    one.read_new()
                # One that is over has no launcher, but nobody can attach to it.
                boards = [one.board for one in followed.values() if one.report is None]
                columns, rows = out.size()
                lines = draw(boards, columns, rows, now)
                out.write(frame(lines, columns, color=color(out.terminal)))
                leaving.wait(1.0)
    finally:
        out.write(LEAVE)


class _Watcher(Observer):
    """Passes the events of a run to its board."""

    def __init__(self, board: Board) -> None:
        self._board = board

    def on_event(self, event: RunEvent) -> None:
        self._board.on_event(event, time.monotonic())


class _ShownRun:
    """The board of a run, updated from the run's folder."""

    def __init__(self, name: str) -> None:
        from dtrain_cli.views.board import Board

        folder = RunFolder.find(name)
        record = Record.load(folder.path)
        self.board = Board(record.run, time.monotonic() - age(record.started))
        self._folder = folder
        self._follower = RunFollower(folder, record, _Watcher(self.board))
        self._follower.skip()
        self._follower.show_training()
        self.read_new()

    @property
    def report(self) -> Report | None:
        """How the run ended; None if it has not."""
        return self._follower.state.report

    def read_new(self) -> None:
        self.board.attended = self._folder.in_charge() is not None
        self._follower.read_new()
