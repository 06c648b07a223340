"""The arguments and options of commands: how to declare them for Typer, and those that several
commands have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from dtrain_cli import completion
from dtrain_cli.views import Display

Offers = Callable[..., Any]
"""Returns the values that a shell offers: a function of `dtrain_cli.completion`."""


def argument(help: str, metavar: str, offers: Offers | None = None) -> Any:
    """An argument by its position."""
    return typer.Argument(help=help, metavar=metavar, autocompletion=offers)


def option(help: str, metavar: str | None = None, offers: Offers | None = None) -> Any:
    """An option with a value, which has the name of the parameter."""
    return typer.Option(help=help, metavar=metavar, autocompletion=offers)


def flag(help: str, *names: str) -> Any:
    """An option without a value; without ``names``, also its negation: ``--NAME/--no-NAME``."""
    return typer.Option(*names, help=help)


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
RUN_HELP = "The name of a run or of its job, or its first characters."
AnyRun = Annotated[str, argument(RUN_HELP, "RUN", completion.runs)]
OpenRun = Annotated[str, argument(RUN_HELP, "RUN", completion.open_runs)]
OpenRuns = Annotated[
    list[str],
    argument(
        "The names of runs or of their jobs, or their first characters.",
        "RUN...",
        completion.open_runs,
    ),
]
OnlyRanks = Annotated[
    str | None, option("Show only these ranks' output, e.g. 0,4-7.", "RANKS", completion.ranks)
]
OnlyHosts = Annotated[
    str | None, option("Show only these hosts' output, e.g. gpu[01-03].", "HOSTS", completion.hosts)
]
Fold = Annotated[bool, flag("Show equal lines of several ranks once.", "--fold")]
Timestamps = Annotated[bool, flag("Show when each line of output arrived.", "--timestamps")]
ShowAs = Annotated[Display | None, option("How to show the run; default: live on a terminal.")]
MetricsPort = Annotated[
    str | None, option("Serve OpenMetrics on this port of 127.0.0.1.", "[ADDRESS:]PORT")
]
MetricsFile = Annotated[
    Path | None, option("Keep OpenMetrics in this file, for node_exporter.", "FILE")
]
ScalarsFolder = Annotated[
    Path | None, option("Write TensorBoard scalars of the job below this folder.", "DIR")
]
