"""`dtrain attach`: show a run that was launched before, and be in charge of it if nobody is."""

from __future__ import annotations

from typing import Annotated

import typer

from dtrain import api
from dtrain_cli.commands.watch import Watch


def attach(
    run: Annotated[str, typer.Argument(help="A run, or how its name begins.", metavar="RUN")],
    json: Annotated[bool, typer.Option("--json", help="One JSON object per event.")] = False,
    fold: Annotated[
        bool, typer.Option("--fold", help="Show a line that several ranks write alike once.")
    ] = False,
) -> None:
    """Watch a run that was launched before; Ctrl-C leaves it running."""
    watch = Watch(stopping=False, json=json, fold=fold)
    code = watch.until_over(
        lambda: api.attach(run, observer=watch.view, control=watch.control, ask=watch.ask)
    )
    raise typer.Exit(code)
