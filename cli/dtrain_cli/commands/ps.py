"""`dtrain ps`: list the runs of this machine, show one run with its hosts, or remove old runs."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer

from dtrain import api
from dtrain.diagnostics import UsageError
from dtrain.messages.decode import excerpt
from dtrain.runs import prune
from dtrain.runs.folder import RunFolder
from dtrain.runs.status import RunStatus, active, find_run, latest, statuses
from dtrain.spec.scalars import seconds
from dtrain_cli import completion, output
from dtrain_cli.output import stdout_paper
from dtrain_cli.parameters import RUN_HELP, argument, flag, option
from dtrain_cli.views import runs as view


def ps(
    run: Annotated[
        str | None, argument(f"Show one run with its hosts. {RUN_HELP}", "RUN", completion.runs)
    ] = None,
    json: Annotated[bool, flag("One JSON object.", "--json")] = False,
    everything: Annotated[
        bool, flag("All runs; default: active ones, or the last five.", "--all", "-a")
    ] = False,
    pruning: Annotated[bool, flag("Remove old runs that are over. Asks first.", "--prune")] = False,
    older_than: Annotated[
        str | None, option("With --prune: ended longer ago; default: 30d.", "AGE")
    ] = None,
    keep: Annotated[
        int | None, option("With --prune: keep the latest N runs that are over.", "N")
    ] = None,
    yes: Annotated[bool, flag("With --prune: do not ask.", "--yes", "-y")] = False,
) -> None:
    """List the runs of this machine."""
    if pruning:
        if run is not None or everything:
            raise UsageError("--prune removes old runs, so it takes no run and no --all")
        _prune(_age(older_than), keep, yes=yes, json=json)
        return
    if older_than is not None or keep is not None or yes:
        raise UsageError("--older-than, --keep and --yes are for --prune", hint="add --prune")
    if run is not None:
        one = _one(run)
        output.write(view.as_json([one], of=1) if json else view.details(one, stdout_paper()))
        return
    shown = statuses() if everything else active() or latest(5)
    of = len(RunFolder.all())
    output.write(view.as_json(shown, of=of) if json else view.table(shown, stdout_paper(), of=of))


def _age(text: str | None) -> float | None:
    if text is None:
        return None
    found = None if text.isdecimal() else seconds(text)
    if found is None:
        raise UsageError(
            f"--older-than {excerpt(text)}: not an age", hint="write e.g. 30d, 12h or 1d12h"
        )
    return found


def _prune(older_than: float | None, keep: int | None, *, yes: bool, json: bool) -> None:
    """List the old runs, and remove them after a question, or with ``yes``."""
    if keep is not None and keep < 0:
        raise UsageError(f"--keep {keep} is not possible", hint="give 0 or a larger number")
    found = prune.sizes(prune.old_runs(statuses(), time.time(), older_than=older_than, keep=keep))
    if not json:
        output.write(view.old(found, stdout_paper()))
    ask = not (yes or json) and sys.stdin is not None and sys.stdin.isatty()
    removing = bool(found) and (yes or (ask and typer.confirm("Remove them?", err=True)))
    if removing:
        for one in found:
            prune.remove(one.run)
    if json:
        output.write(view.old_as_json(found, removed=removing))
    elif removing:
        output.write("removed\n")
    elif found:
        output.write("nothing is removed" + ("" if ask else ": add --yes") + "\n")


def _one(run: str) -> RunStatus:
    folder = find_run(run)
    try:
        return api.LaunchedRun(folder.name).status(ask_hosts=True)
    except UsageError as error:
        hint = f"its workers' output may still be in {folder.logs}"
        raise UsageError(error.message, hint=hint) from None
