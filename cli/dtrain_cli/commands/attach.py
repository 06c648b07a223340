"""`dtrain attach`: show a run that was launched before, and be in charge of it if nobody is."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from dtrain.diagnostics import ExitCode, UsageError
from dtrain.failures.cause import Report
from dtrain.runs.log_store import RunFolder
from dtrain.runs.record import Record
from dtrain.session.controller import Session
from dtrain.session.follow import Follower, ending
from dtrain_cli.commands.secrets import known_secrets
from dtrain_cli.commands.watch import Departure, Watch, on_signals
from dtrain_cli.detachment import Detachment
from dtrain_cli.views import Filters, make_view


def attach(
    run: Annotated[str, typer.Argument(help="A run, or how its name begins.", metavar="RUN")],
    json: Annotated[bool, typer.Option("--json", help="One JSON object per event.")] = False,
    fold: Annotated[
        bool, typer.Option("--fold", help="Show a line that several ranks write alike once.")
    ] = False,
) -> None:
    """Watch a run that was launched before; Ctrl-C leaves it running."""
    raise typer.Exit(_attach(RunFolder.find(run), json, fold))


def _attach(folder: RunFolder, json: bool, fold: bool) -> ExitCode:
    """Show a run until it ends, or until Ctrl-C, after which it goes on; its exit code."""
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
                    return _take_charge(folder, json, fold, departure)
                finally:
                    claim.release()
            code = _look_on(folder, json, fold, departure)
            if code is not None:
                return code
            # Whoever was in charge has gone: it is our turn.


def _take_charge(folder: RunFolder, json: bool, fold: bool, departure: Departure) -> ExitCode:
    # Only now, because whoever was in charge before may have started the job again.
    record = Record.load(folder.path)
    secrets = known_secrets(record.request.spec())

    def work(session: Session) -> Report:
        if departure.asked:
            session.leave()
        return session.attach(record, folder, secrets)

    with Watch(record.request, json, Filters(), fold, Detachment.none()) as watch:
        return watch.until_over(work, stopping=False)


def _look_on(folder: RunFolder, json: bool, fold: bool, departure: Departure) -> ExitCode | None:
    """Show what the process in charge writes down. None when it went before the run was over."""
    view = make_view(json, sys.stdout, sys.stderr, Filters(), fold, departure.ask)
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
