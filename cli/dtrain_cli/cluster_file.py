"""Parameters of commands that read a cluster file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dtrain_cli import completion
from dtrain_cli.declare import argument

ClusterFilePath = Annotated[Path, argument("The cluster file.", "FILE", completion.cluster_files)]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Replace a value of FILE, e.g. job.restart.max=3; repeatable.",
        metavar="KEY=VALUE",
        autocompletion=completion.settings,
    ),
]
