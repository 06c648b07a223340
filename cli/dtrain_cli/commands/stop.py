"""`dtrain stop`: end a run from anywhere on the launching machine."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from dataclasses import dataclass

from dtrain.diagnostics import ExitCode, UsageError
from dtrain.logs.store import RunFolder
from dtrain.record import Record
from dtrain.session.follow import Follower, ending
from dtrain_cli.commands.watch import Departure, Watch, on_signals
from dtrain_cli.detachment import Detachment
from dtrain_cli.views import Filters, make_view

APART = 0.3
"""Seconds between two signals, which could otherwise arrive as one."""


@dataclass(frozen=True, slots=True)
class Options:
    """The command line of `dtrain stop`."""

    run: str
    force: bool


def stop(options: Options) -> ExitCode:
    """End a run and see that nothing is left of it."""
    folder = RunFolder.find(options.run)
    asked = False
    while True:
        claim = folder.claim()
        if claim is not None:
            try:
                return _end(options, folder, asked)
            finally:
                claim.release()
        _ask(options, folder, not asked)
        asked = True


def _end(options: Options, folder: RunFolder, asked: bool) -> ExitCode:
    """Nobody is in charge of the run: take charge, and end it, or what it has left behind."""
    record = Record.load(folder.path)
    over = ending(folder) is not None
    if over and not record.stray:
        if not asked:
            raise UsageError(f"run {folder.name} is over already")
        return ExitCode.OK
    with Watch(record.request, False, Filters(), False, Detachment.none()) as watch:
        watch.view.mute()
        if over:
            return watch.clean(record, folder)
        for _ in range(2 if options.force else 1):
            watch.stop("dtrain stop")
        code = watch.until_over(lambda session: session.attach(record, folder, None), stopping=True)
    return ExitCode.OK if code is ExitCode.INTERRUPTED else code


def _ask(options: Options, folder: RunFolder, first: bool) -> None:
    """Have the process in charge end the run, and wait until it has gone."""
    departure = Departure()
    view = make_view(False, sys.stdout, sys.stderr, Filters(), False, departure.ask)
    view.mute()
    with on_signals(departure.ask):
        follower = Follower(folder, Record.load(folder.path), view)
        follower.skip()
        if first:
            for number in range(2 if options.force else 1):
                time.sleep(APART * number)
                if (pid := folder.in_charge()) is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGTERM)
        report = follower.follow(departure.wait)
        while report is not None and folder.in_charge() is not None and not departure.wait(0.1):
            pass
    if report is not None:
        view.finished(report)
    else:
        view.close()
    view.wait(5)
    if departure.asked:
        raise KeyboardInterrupt
