"""`dtrain stop`: end a run from anywhere on the launching machine."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from typing import Annotated

import typer

from dtrain.diagnostics import ExitCode, UsageError
from dtrain.failures.cause import Report
from dtrain.runs.log_store import RunFolder
from dtrain.runs.record import Record
from dtrain.session.controller import Session
from dtrain.session.follow import Follower, ending
from dtrain_cli.commands.watch import INSIST, Departure, Watch, on_signals
from dtrain_cli.detachment import Detachment
from dtrain_cli.views import Filters, make_view

LETTING_GO = 5.0
"""Seconds that a process has to go after the run is over: nobody may read what it shows."""


def stop(
    run: Annotated[str, typer.Argument(help="A run, or how its name begins.", metavar="RUN")],
    force: Annotated[bool, typer.Option("--force", help="Kill at once, without TERM.")] = False,
) -> None:
    """Stop a run on all its hosts."""
    raise typer.Exit(_stop(RunFolder.find(run), force))


def _stop(folder: RunFolder, force: bool) -> ExitCode:
    departure = Departure()
    waited = False
    asked: set[int] = set()
    # Whoever takes charge can be asked to stop by somebody else from that moment on.
    with on_signals(departure.ask):
        while not _is_over(folder):
            claim = folder.claim()
            if claim is not None:
                try:
                    return _end(folder, force, departure)
                finally:
                    claim.release()
            _ask(folder, force, asked, departure)
            waited = True
    if not waited:
        raise UsageError(f"run {folder.name} is over already")
    return ExitCode.OK


def _is_over(folder: RunFolder) -> bool:
    """Whether nothing is left to be ended."""
    return ending(folder) is not None and not Record.load(folder.path).stray


def _end(folder: RunFolder, force: bool, departure: Departure) -> ExitCode:
    """Nobody is in charge of the run: take charge, and end it, or what it has left behind."""
    record = Record.load(folder.path)
    with Watch(record.request, False, Filters(), False, Detachment.none()) as watch:
        watch.view.mute()
        if ending(folder) is not None:
            return watch.clean(record, folder)
        for _ in range(2 if force else 1):
            watch.stop("dtrain stop")

        def work(session: Session) -> Report:
            # Signals that came before this one watched for them.
            for number in departure.numbers:
                watch.on_signal(number)
            return session.attach(record, folder, None)

        code = watch.until_over(work, stopping=True)
    return ExitCode.OK if code is ExitCode.INTERRUPTED else code


def _ask(folder: RunFolder, force: bool, asked: set[int], departure: Departure) -> None:
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
                os.kill(pid, INSIST if force else signal.SIGTERM)
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
