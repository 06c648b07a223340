"""`dtrain ps`: list the runs of this machine, or show one run with its hosts."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from dtrain.diagnostics import UsageError
from dtrain.runs.log_store import RunFolder
from dtrain.runs.record import Record
from dtrain.session.status import RunStatus, status, statuses
from dtrain_cli import completion, output
from dtrain_cli.sheet import stdout_paper
from dtrain_cli.views import runs as view


def ps(
    run: Annotated[
        str | None,
        typer.Argument(
            help="One run, with its hosts.", metavar="[RUN]", autocompletion=completion.runs
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    everything: Annotated[
        bool, typer.Option("--all", "-a", help="All runs; default: active ones, or the last five.")
    ] = False,
) -> None:
    """List the runs of this machine."""
    if run is not None:
        one = _one(run)
        output.write(view.as_json([one]) if json else view.details(one, stdout_paper()))
        return
    found = statuses()
    shown = found if everything else [one for one in found if one.active] or found[-5:]
    output.write(view.as_json(shown) if json else view.table(shown, stdout_paper(), of=len(found)))


def _one(run: str) -> RunStatus:
    folder = RunFolder.find(run)
    try:
        one = status(folder)
    except UsageError as error:
        hint = f"its workers' output may still be in {folder.logs}"
        raise UsageError(error.message, hint=hint) from None
    if one.state == "unattended":
        one = _asked(one, Record.load(folder.path))
    return one


def _asked(run: RunStatus, record: Record) -> RunStatus:
    """Complete the status of an unattended run with its hosts' own reports."""
    # A list of runs needs no threads and transports, so import them only here.
    from dtrain.engines.select import engine
    from dtrain.session.control import Control
    from dtrain.session.observer import NullObserver

    with engine(record.request, NullObserver(), Control()) as asked:
        return replace(run, hosts=asked.status(record, run.hosts))
