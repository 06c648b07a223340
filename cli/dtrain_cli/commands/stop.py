"""`dtrain stop`: stop runs from any terminal of the launching machine."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

import typer

from dtrain import api
from dtrain.diagnostics import DtrainError
from dtrain.session.stopping.signals import on_signals
from dtrain_cli.commands.watch import Watch
from dtrain_cli.errors import explain
from dtrain_cli.parameters import OpenRuns, flag
from dtrain_cli.views import Display


def stop(
    runs: OpenRuns,
    force: Annotated[bool, flag("Send KILL at once, without TERM.", "--force")] = False,
) -> None:
    """Stop runs on all their hosts."""
    # Several dashboards would draw over each other.
    display = Display.PLAIN if len(runs) > 1 else None
    watches = {run: Watch(stopping=True, display=display) for run in runs}

    def end(run: str) -> int:
        watch = watches[run]
        try:
            return watch.until_stopped(
                lambda: api.stop(
                    run, force=force, observer=watch.view, control=watch.control, ask=watch.ask
                )
            )
        except DtrainError as error:  # the other runs end all the same
            return explain(error)

    def pass_on(number: int) -> None:
        for watch in watches.values():
            watch.on_signal(number)

    with on_signals(pass_on), ThreadPoolExecutor(len(watches)) as pool:
        codes = list(pool.map(end, watches))
    raise typer.Exit(max(codes))
