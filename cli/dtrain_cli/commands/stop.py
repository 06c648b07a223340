"""`dtrain stop`: end a run from anywhere on the launching machine."""

from __future__ import annotations

import os
import signal
import sys
import threading
from dataclasses import dataclass

from dtrain.diagnostics import ExitCode, UsageError
from dtrain.logs.store import RunFolder
from dtrain.record import Record
from dtrain.session.follow import Follower, ending
from dtrain_cli.commands.watch import Watch, on_signals
from dtrain_cli.detachment import Detachment
from dtrain_cli.views import Filters, make_view


@dataclass(frozen=True, slots=True)
class Options:
    """The command line of `dtrain stop`."""

    run: str
    force: bool


def stop(options: Options) -> ExitCode:
    """End a run and see that nothing is left of it."""
    folder = RunFolder.find(options.run)
    record = Record.load(folder.path)
    asked = False
    while True:
        report = ending(folder)
        if report is not None and not report.lost:
            if not asked:
                raise UsageError(f"run {folder.name} is over already")
            return ExitCode.OK
        claim = folder.claim()
        if claim is not None:
            try:
                return _end(options, record, folder)
            finally:
                claim.release()
        asked = True
        _ask(options, record, folder)


def _end(options: Options, record: Record, folder: RunFolder) -> ExitCode:
    """Nobody is in charge of the run: take charge, and end it."""
    with Watch(record.request, False, Filters(), False, Detachment.none()) as watch:
        watch.view.mute()
        for _ in range(2 if options.force else 1):
            watch.stop("dtrain stop")
        code = watch.until_over(lambda session: session.attach(record, folder, None), stopping=True)
    return ExitCode.OK if code is ExitCode.INTERRUPTED else code


def _ask(options: Options, record: Record, folder: RunFolder) -> None:
    """Have the process in charge end the run, and wait until it has."""
    gone = threading.Event()
    view = make_view(False, sys.stdout, sys.stderr, Filters(), False, on_broken_pipe=gone.set)
    view.mute()
    with on_signals(lambda number: gone.set()):
        follower = Follower(folder, record, view)
        follower.skip()
        # Two signals of one kind could arrive as one.
        for number in (signal.SIGTERM, signal.SIGINT)[: 2 if options.force else 1]:
            if (pid := folder.in_charge()) is not None:
                os.kill(pid, number)
        report = follower.follow(gone)
    if report is not None:
        view.finished(report)
        view.wait()
    elif gone.is_set():
        raise KeyboardInterrupt
