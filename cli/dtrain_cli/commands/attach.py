"""`dtrain attach`: show a run that was launched before, and be in charge of it if nobody is."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass

from dtrain.diagnostics import ExitCode, UsageError
from dtrain.logs.store import RunFolder
from dtrain.record import Record
from dtrain.session.follow import Follower, ending
from dtrain_cli.commands.secrets import known_secrets
from dtrain_cli.commands.watch import Watch, on_signals
from dtrain_cli.detachment import Detachment
from dtrain_cli.views import Filters, make_view


@dataclass(frozen=True, slots=True)
class Options:
    """The command line of `dtrain attach`."""

    run: str
    json: bool
    fold: bool


def attach(options: Options) -> ExitCode:
    """Show a run until it ends, or until Ctrl-C, after which it goes on; its exit code."""
    folder = RunFolder.find(options.run)
    record = Record.load(folder.path)
    while True:
        if ending(folder) is not None:
            raise UsageError(
                f"run {folder.name} is over", hint=f"`dtrain logs {folder.name}` shows it"
            )
        claim = folder.claim()
        if claim is not None:
            try:
                return _take_charge(options, record, folder)
            finally:
                claim.release()
        code = _look_on(options, record, folder)
        if code is not None:
            return code
        # Whoever was in charge has gone, and the run is not over: it is our turn.


def _take_charge(options: Options, record: Record, folder: RunFolder) -> ExitCode:
    with Watch(record.request, options.json, Filters(), options.fold, Detachment.none()) as watch:
        secrets = known_secrets(record.request.spec())
        return watch.until_over(
            lambda session: session.attach(record, folder, secrets), stopping=False
        )


def _look_on(options: Options, record: Record, folder: RunFolder) -> ExitCode | None:
    """Show what the process in charge writes down. None when it went before the run was over."""
    left = threading.Event()
    view = make_view(
        options.json, sys.stdout, sys.stderr, Filters(), options.fold, on_broken_pipe=left.set
    )
    with on_signals(lambda number: left.set()):
        follower = Follower(folder, record, view)
        follower.skip()
        report = follower.follow(left)
        if report is not None:
            view.finished(report)
            while not view.wait(0.5):
                if left.is_set():
                    view.hurry()
            return report.exit_code
    if not left.is_set():
        return None
    view.left(folder.name)
    view.wait()
    return ExitCode.INTERRUPTED
