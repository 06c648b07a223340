"""`dtrain ps`: list the runs of this machine, or show one run with its hosts."""

from __future__ import annotations

from typing import Annotated

import typer

from dtrain import api
from dtrain.diagnostics import UsageError
from dtrain.runs.log_store import RunFolder
from dtrain.session.status import RunStatus, statuses
from dtrain_cli import completion, output
from dtrain_cli.sheet import stdout_paper
from dtrain_cli.views import runs as view


def ps(
    run: Annotated[
        str | None,
        typer.Argument(
            help="One run, with its hosts.", metavar="RUN", autocompletion=completion.runs
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
        return api.LaunchedRun(run).status(ask_hosts=True)
    except UsageError as error:
        hint = f"its workers' output may still be in {folder.logs}"
        raise UsageError(error.message, hint=hint) from None
