"""Parameters that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

from dtrain_cli import completion
from dtrain_cli.views import Display

OpenRun = Annotated[
    str,
    typer.Argument(
        help="A run's name, or its first characters.",
        metavar="RUN",
        autocompletion=completion.open_runs,
    ),
]
Fold = Annotated[
    bool, typer.Option("--fold", help="Show a line that several ranks write only once.")
]
ShowAs = Annotated[
    Display | None, typer.Option(help="How to show the run; default: live on a terminal.")
]
