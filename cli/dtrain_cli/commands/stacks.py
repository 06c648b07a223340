"""`dtrain stacks`: where the workers of a run are now."""

from __future__ import annotations

from typing import Annotated

import typer

from dtrain.engines import existing
from dtrain.failures.cause import LEFT, Report
from dtrain.runs.events import NoticeShown, RunEvent
from dtrain.runs.status import find_run
from dtrain.session.caller import Caller
from dtrain.session.reporting.observer import Observer
from dtrain.session.stopping.control import Control
from dtrain.session.stopping.signals import on_signals
from dtrain_cli import output, prompt
from dtrain_cli.errors import say
from dtrain_cli.parameters import OpenRun, flag
from dtrain_cli.views import stacks as view
from dtrain_cli.views.report import render


def stacks(
    run: OpenRun,
    full: Annotated[
        bool, flag("Show the stack in each place, innermost frame first.", "--full")
    ] = False,
    json: Annotated[bool, flag("One JSON object.", "--json")] = False,
) -> None:
    """Show where the workers of a run are now, by their Python stacks.

    The job goes on. The hosts need py-spy in the environment of the workers. Ctrl-C ends the wait.
    """
    folder, control = find_run(run), Control()
    ask = prompt.asker(cancelled=lambda: control.interrupted)
    with (
        on_signals(lambda number: control.leave()),
        output.progress("waiting for the stacks of the workers"),
    ):
        found = existing.stacks(folder, Caller(_Notices(), control, ask))
    if isinstance(found, Report):
        if found is not LEFT:
            say(render(found, {}, color=False).rstrip("\n"))
        raise typer.Exit(found.exit_code)
    output.write(view.as_json(folder.name, found) if json else view.text(found, full=full))


class _Notices(Observer):
    def on_event(self, event: RunEvent) -> None:
        if isinstance(event, NoticeShown):
            output.notice(event.text)
