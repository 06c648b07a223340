"""`dtrain attach`: show a run that was launched before, and be in charge of it if nobody is."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from dtrain.cause import Report
from dtrain.diagnostics import ExitCode, UsageError
from dtrain.logs.store import RunFolder
from dtrain.record import Record
from dtrain.session.controller import Session
from dtrain.session.follow import Follower, ending
from dtrain_cli.commands.secrets import known_secrets
from dtrain_cli.commands.watch import Departure, Watch, on_signals
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
    if ending(folder) is not None:
        raise UsageError(f"run {folder.name} is over", hint=f"`dtrain logs {folder.name}` shows it")
    departure = Departure()
    # Whoever takes charge can be asked to leave, by `dtrain stop` say, from that moment on.
    with on_signals(departure.ask):
        while True:
            claim = folder.claim()
            if claim is not None:
                try:
                    if (report := ending(folder)) is not None:
                        return report.exit_code
                    return _take_charge(options, folder, departure)
                finally:
                    claim.release()
            code = _look_on(options, folder, departure)
            if code is not None:
                return code
            # Whoever was in charge has gone: it is our turn.


def _take_charge(options: Options, folder: RunFolder, departure: Departure) -> ExitCode:
    # Only now, because whoever was in charge before may have started the job again.
    record = Record.load(folder.path)
    secrets = known_secrets(record.request.spec())

    def work(session: Session) -> Report:
        if departure.asked:
            session.leave()
        return session.attach(record, folder, secrets)

    with Watch(record.request, options.json, Filters(), options.fold, Detachment.none()) as watch:
        return watch.until_over(work, stopping=False)


def _look_on(options: Options, folder: RunFolder, departure: Departure) -> ExitCode | None:
    """Show what the process in charge writes down. None when it went before the run was over."""
    view = make_view(options.json, sys.stdout, sys.stderr, Filters(), options.fold, departure.ask)
    follower = Follower(folder, Record.load(folder.path), view)
    follower.skip()
    report = follower.follow(departure.wait)
    if report is not None:
        view.finished(report)
    elif departure.asked:
        view.left(folder.name)
    else:
        view.close()
    while not view.wait(0.2):
        if departure.asked:
            view.hurry()
            if report is not None:
                break
    if report is not None:
        return report.exit_code
    return ExitCode.INTERRUPTED if departure.asked else None
