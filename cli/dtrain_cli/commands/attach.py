"""`dtrain attach`: show a run, and take charge of it if no launcher is in charge."""

from __future__ import annotations

from typing import Annotated

import typer

from dtrain import api
from dtrain_cli import completion
from dtrain_cli.commands.watch import Watch
from dtrain_cli.views import Display


def attach(
    run: Annotated[
        str,
        typer.Argument(
            help="A run's name, or its first characters.",
            metavar="RUN",
            autocompletion=completion.open_runs,
        ),
    ],
    json: Annotated[bool, typer.Option("--json", help="One JSON object per event.")] = False,
    fold: Annotated[
        bool, typer.Option("--fold", help="Show a line that several ranks write only once.")
    ] = False,
    view: Annotated[
        Display | None, typer.Option(help="How to show the run; default: live on a terminal.")
    ] = None,
) -> None:
    """Watch a run; Ctrl-C leaves it running."""
    watch = Watch(stopping=False, json=json, fold=fold, display=view)
    code = watch.until_over(
        lambda: api.attach(run, observer=watch.view, control=watch.control, ask=watch.ask)
    )
    raise typer.Exit(code)
