"""`dtrain stop`: stop a run from any terminal of the launching machine."""

from __future__ import annotations

from typing import Annotated

import typer

from dtrain import api
from dtrain_cli.commands.watch import Watch
from dtrain_cli.declare import flag
from dtrain_cli.parameters import OpenRun


def stop(
    run: OpenRun,
    force: Annotated[bool, flag("Send KILL at once, without TERM.", "--force")] = False,
) -> None:
    """Stop a run on all its hosts."""
    watch = Watch(stopping=True)
    code = watch.until_stopped(
        lambda: api.stop(
            run, force=force, observer=watch.view, control=watch.control, ask=watch.ask
        )
    )
    raise typer.Exit(code)
