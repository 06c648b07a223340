"""`dtrain stop`: end a run from anywhere on the launching machine."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from dataclasses import dataclass

from dtrain.cause import Report
from dtrain.diagnostics import ExitCode, UsageError
from dtrain.logs.store import RunFolder
from dtrain.record import Record
from dtrain.session.controller import Session
from dtrain.session.follow import Follower, ending
from dtrain_cli.commands.watch import INSIST, Departure, Watch, on_signals
from dtrain_cli.detachment import Detachment
from dtrain_cli.views import Filters, make_view

LETTING_GO = 5.0
"""Seconds that a process has to go after the run is over: nobody may read what it shows."""


@dataclass(frozen=True, slots=True)
class Options:
    """The command line of `dtrain stop`."""

    run: str
    force: bool


def stop(options: Options) -> ExitCode:
    """End a run and see that nothing is left of it."""
    folder = RunFolder.find(options.run)
    departure = Departure()
    waited = False
    asked: set[int] = set()
    # Whoever takes charge can be asked to stop by somebody else from that moment on.
    with on_signals(departure.ask):
        while not _is_over(folder):
            claim = folder.claim()
            if claim is not None:
                try:
                    return _end(options, folder, departure)
                finally:
                    claim.release()
            _ask(options, folder, asked, departure)
            waited = True
    if not waited:
        raise UsageError(f"run {folder.name} is over already")
    return ExitCode.OK


def _is_over(folder: RunFolder) -> bool:
    """Whether nothing is left to be ended."""
    return ending(folder) is not None and not Record.load(folder.path).stray


def _end(options: Options, folder: RunFolder, departure: Departure) -> ExitCode:
    """Nobody is in charge of the run: take charge, and end it, or what it has left behind."""
    record = Record.load(folder.path)
    with Watch(record.request, False, Filters(), False, Detachment.none()) as watch:
        watch.view.mute()
        if ending(folder) is not None:
            return watch.clean(record, folder)
        for _ in range(2 if options.force else 1):
            watch.stop("dtrain stop")

        def work(session: Session) -> Report:
            # Signals that came before this one watched for them.
            for number in departure.numbers:
                watch.on_signal(number)
            return session.attach(record, folder, None)

        code = watch.until_over(work, stopping=True)
    return ExitCode.OK if code is ExitCode.INTERRUPTED else code


def _ask(options: Options, folder: RunFolder, asked: set[int], departure: Departure) -> None:
    """Have the process in charge end the run, and wait until it has gone. ``asked`` are those that
    have been asked before."""
    view = make_view(False, sys.stdout, sys.stderr, Filters(), False, departure.ask)
    view.mute()
    follower = Follower(folder, Record.load(folder.path), view)
    follower.skip()
    report = None
    # One that is in charge of a run that is over ends what is left of it, and is left to it.
    over = follower.report is not None
    if not over:
        pid = folder.in_charge()
        if pid is not None and pid not in asked:
            asked.add(pid)
            try:
                os.kill(pid, INSIST if options.force else signal.SIGTERM)
                os.kill(pid, signal.SIGCONT)  # Ctrl-Z may have stopped it
            except ProcessLookupError:
                pass
            except PermissionError:
                raise UsageError(
                    f"process {pid}, which is in charge of run {folder.name}, is another user's",
                    hint="stop the run as that user",
                ) from None
        # Somebody else may take charge when it leaves, and is to be asked in its turn.
        follower.follow(lambda seconds: departure.wait(seconds) or folder.in_charge() != pid)
        follower.look()
        report = follower.report
    until = math.inf if over else time.monotonic() + LETTING_GO
    while follower.report is not None and folder.in_charge() is not None:
        if departure.wait(0.1) or time.monotonic() > until:
            break
    if report is not None:
        view.finished(report)
    else:
        view.close()
    view.wait(5)
    if departure.asked:
        raise KeyboardInterrupt
