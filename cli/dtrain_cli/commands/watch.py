"""A launch on the terminal: its view, its signals, its questions."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from dtrain.diagnostics import ExitCode
from dtrain.engines.detachment import Detachment
from dtrain.failures.cause import Report
from dtrain.runs.folder import RunFolder
from dtrain.session.reporting.observer import Both
from dtrain.session.stopping.control import Control
from dtrain.session.stopping.signals import INSIST, STOP, on_signals, stop_by_signal
from dtrain.transport.questions import Ask
from dtrain_cli import prompt
from dtrain_cli.memory import tune_heap
from dtrain_cli.standard import reader_gone, unwritable
from dtrain_cli.views import Display, Filters, make_view

if TYPE_CHECKING:
    from dtrain_cli.export import Exports


LEAVE_SECONDS = 1.0
"""Seconds that a detached launch waits for a terminal that takes no output (Ctrl-S)."""


def exports(port: str | None, file: Path | None, scalars: Path | None) -> Exports | None:
    """What `Exports` gets, if any of it is wanted. Raises UsageError."""
    if port is None and file is None and scalars is None:
        return None
    from dtrain_cli.export import Exports

    return Exports(port, file, scalars)


class Watch:
    """Shows a library call on the terminal: its observer, its control, and its prompts."""

    def __init__(
        self,
        *,
        stopping: bool,
        json: bool = False,
        filters: Filters | None = None,
        fold: bool = False,
        timestamps: bool = False,
        detachment: Detachment | None = None,
        display: Display | None = None,
        exports: Exports | None = None,
    ) -> None:
        """With ``stopping``, Ctrl-C and other signals stop the job; without, only those of `dtrain
        stop` do, and the others end the view."""
        tune_heap()
        self._stopping = stopping
        self._detachment = detachment
        self._signalled = self._over = self._enough = self._view_muted = False
        self.control = Control()
        if detachment is not None and display is not Display.QUIET:
            # stderr becomes a file, which redrawn dashboards would fill.
            display = Display.PLAIN
        self.view = make_view(
            sys.stdout,
            sys.stderr,
            filters or Filters(),
            self._broken_pipe,
            json=json,
            fold=fold,
            display=display,
            timestamps=timestamps,
        )
        self._exports = exports
        if exports is not None and exports.address:
            self.view.notice(f"metrics: {exports.address}")
        self.observer = self.view if exports is None else Both(self.view, exports)
        """What the library call reports to."""
        self.ask: Ask | None = prompt.asker(self.view.pause, lambda: self.control.interrupted)

    def until_over(self, work: Callable[[], Report]) -> ExitCode:
        """Run ``work`` and show the run until it ends."""
        exports = self._exports or nullcontext()
        with exports, on_signals(self.on_signal), suspendable(self.view.pause):
            try:
                report = work()
                self._over = True
                while not self.view.wait(0.5) and not self._enough:
                    pass
            except BaseException:
                # Whatever is printed next must not end up below or inside a dashboard.
                with self.view.pause():
                    raise
        code, error = report.exit_code, self.view.output_error
        stopped = code is ExitCode.INTERRUPTED and not self._signalled
        if error is not None and (stopped or code is ExitCode.OK):
            raise unwritable(error)
        return code

    def until_stopped(self, work: Callable[[], ExitCode]) -> ExitCode:
        """Run ``work``, which stops a run, and show dtrain's notices but no worker output. The
        caller passes signals to `on_signal`."""
        self.view.mute()
        code = work()
        self.view.close()
        self.view.wait(5)
        error = self.view.output_error
        closed = error is not None and reader_gone(error) and not self._signalled
        return ExitCode.OUTPUT_CLOSED if closed else code

    def running(self, run: str) -> None:
        """Leave the terminal if this launch is detached: all workers have started."""
        if self._detachment is not None:
            # The thread that follows the job calls this.
            with self.view.pause(LEAVE_SECONDS):
                self.view.mute()
                self._detachment.leave_terminal(run, RunFolder.find(run).path)

    def on_signal(self, number: int) -> None:
        self._signalled = True
        if self._over:
            # On the second signal, drop the unwritten output: its reader may be stuck.
            self._enough = self._view_muted
            self._view_muted = True
            self.view.mute()
        elif self._stopping or number in (STOP, INSIST):  # `attach` may be in charge of the run
            stop_by_signal(self.control, number)
        else:
            self.control.leave()

    def _broken_pipe(self) -> None:
        if self._stopping:
            self.control.hang_up("its output was closed")
        else:
            self.control.leave()


@contextmanager
def suspendable(away: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """On Ctrl-Z, leave the screen to the shell until the user comes back. Main thread only.
    ``away`` clears the screen, and draws it again at its end."""
    before = signal.getsignal(signal.SIGTSTP)

    def suspend(_number: int, _frame: object) -> None:
        with away():
            signal.raise_signal(signal.SIGSTOP)

    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGTSTP, suspend)
    try:
        yield
    finally:
        signal.signal(signal.SIGTSTP, before)
