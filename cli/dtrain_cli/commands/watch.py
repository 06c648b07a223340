"""A session on the terminal: its view, its signals, its questions."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from dtrain.diagnostics import DtrainError, ExitCode
from dtrain.failures.cause import Report
from dtrain.runs.log_store import RunFolder
from dtrain.runs.record import Record, Request
from dtrain.session.controller import Session
from dtrain.transport.questions import Ask, never
from dtrain.transport.select import Transports
from dtrain_cli import prompt
from dtrain_cli.detachment import Detachment
from dtrain_cli.standard import OutputError
from dtrain_cli.views import Filters, make_view

INSIST = signal.SIGUSR1
"""Asks for the end at once: unlike Ctrl-C's, no shell has it ignored in the background."""
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, INSIST)


class Watch:
    """One session with everything around it. Use it as a context manager."""

    def __init__(
        self,
        request: Request,
        json: bool,
        filters: Filters,
        fold: bool,
        detachment: Detachment,
    ) -> None:
        self.view = make_view(
            json,
            sys.stdout,
            sys.stderr,
            filters,
            fold,
            on_broken_pipe=self._broken_pipe,
            # A header that is redrawn would fill the file that it goes to later.
            live=not detachment.in_background,
        )
        self._stopping = True
        self._over = False
        self._enough = self._view_hurries = False
        self._detachment = detachment
        self._transport = Transports(request.base, self._asker(), notice=self.view.notice)
        self._session = Session(
            request,
            transport=self._transport,
            observer=self.view,
            on_running=self._running,
        )

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._transport.close()

    def until_over(self, work: Callable[[Session], Report], *, stopping: bool) -> ExitCode:
        """Do ``work`` and show it to the end. Ctrl-C and the like end the job where ``stopping``
        is set, and only the watching where it is not."""
        self._stopping = stopping
        with on_signals(self.on_signal):
            try:
                report = work(self._session)
                self._over = True
                while not self.view.wait(0.5) and not self._enough:
                    pass
            except DtrainError:
                with self.view.pause():
                    raise
        if report.exit_code is ExitCode.OK and self.view.output_error is not None:
            raise OutputError(self.view.output_error)
        return report.exit_code

    def clean(self, record: Record, folder: RunFolder) -> ExitCode:
        """End what a run that is over has left on hosts that could not be reached."""
        with on_signals(self.on_signal):
            clean = self._session.clean(record, folder)
        if clean:
            self.view.notice("nothing is left of it now")
        else:
            self.view.notice("some hosts cannot be reached; stop it again when they can")
        self.view.close()
        self.view.wait(5)
        if clean:
            return ExitCode.OK
        return ExitCode.INTERRUPTED if self._session.interrupted else ExitCode.NODE_FAILED

    def stop(self, why: str) -> None:
        self._session.interrupt(why)

    def on_signal(self, number: int) -> None:
        if self._over:
            # The second time, what is left unwritten is: its reader may never read again.
            self._enough = self._view_hurries
            self._view_hurries = True
            self.view.hurry()
        elif not self._stopping:
            self._session.leave()
        elif number == signal.SIGHUP:
            self._session.hang_up("its terminal was closed")
        elif number == signal.SIGTERM:
            # Two programs that each ask for the end ask for no kill.
            self._session.interrupt("SIGTERM", once=True)
        elif number == INSIST:
            self._session.insist("dtrain stop --force")
        else:
            self._session.interrupt("Ctrl-C")

    def _broken_pipe(self) -> None:
        if self._stopping:
            self._session.hang_up("nobody reads its output")
        else:
            self._session.leave()

    def _running(self, run: str) -> None:
        if self._detachment.in_background:
            with self.view.pause():
                self.view.mute()
                self._detachment.leave_terminal(run, RunFolder.find(run).path)

    def _asker(self) -> Ask | None:
        """How to ask the person at the terminal; None where no person can answer."""
        if not sys.stdin or not sys.stdin.isatty():
            return None

        def ask(
            text: str, /, *, echo: bool = False, unwanted: Callable[[], bool] = never
        ) -> str | None:
            with self.view.pause():
                return prompt.ask(text, lambda: self._session.interrupted or unwanted(), echo=echo)

        return ask


@contextmanager
def on_signals(act: Callable[[int], None]) -> Iterator[None]:
    """Have Ctrl-C, a polite kill and a closed terminal all end the launch in good order."""
    before = {number: signal.getsignal(number) for number in _STOP_SIGNALS}
    for number in _STOP_SIGNALS:
        # nohup's choice to outlive the terminal is kept.
        if before[number] is not signal.SIG_IGN:
            signal.signal(number, lambda number, _frame: act(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Departure:
    """That somebody who looks on wants to leave: Ctrl-C, or a pipe that nobody reads.

    Not an Event: two signals close together could wait for its lock for ever.
    """

    def __init__(self) -> None:
        self.asked = False
        self.numbers: list[int] = []
        """The signals that came, for whoever takes over from the one who looked on."""

    def ask(self, number: int | None = None) -> None:
        self.asked = True
        if number is not None:
            self.numbers.append(number)

    def wait(self, seconds: float) -> bool:
        """Whether it was asked for, after so many seconds at most."""
        if not self.asked:
            time.sleep(seconds)
        return self.asked
