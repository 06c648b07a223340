"""Parameters of commands that show a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dtrain_cli import completion
from dtrain_cli.views import Display

RUN_HELP = "The name of a run or of its job, or its first characters."
AnyRun = Annotated[
    str, typer.Argument(help=RUN_HELP, metavar="RUN", autocompletion=completion.runs)
]
OpenRun = Annotated[
    str, typer.Argument(help=RUN_HELP, metavar="RUN", autocompletion=completion.open_runs)
]
OnlyRanks = Annotated[
    str | None,
    typer.Option(
        help="Show only these ranks' output, e.g. 0,4-7.",
        metavar="RANKS",
        autocompletion=completion.ranks,
    ),
]
OnlyHosts = Annotated[
    str | None,
    typer.Option(
        help="Show only these hosts' output, e.g. gpu[01-03].",
        metavar="HOSTS",
        autocompletion=completion.hosts,
    ),
]
Fold = Annotated[bool, typer.Option("--fold", help="Show equal lines of several ranks once.")]
Timestamps = Annotated[
    bool, typer.Option("--timestamps", help="Show when each line of output arrived.")
]
ShowAs = Annotated[
    Display | None, typer.Option(help="How to show the run; default: live on a terminal.")
]
MetricsPort = Annotated[
    str | None,
    typer.Option(help="Serve OpenMetrics on this port of 127.0.0.1.", metavar="[ADDRESS:]PORT"),
]
MetricsFile = Annotated[
    Path | None,
    typer.Option(help="Keep OpenMetrics in this file, for node_exporter.", metavar="FILE"),
]
ScalarsFolder = Annotated[
    Path | None,
    typer.Option(help="Write TensorBoard scalars of the job below this folder.", metavar="DIR"),
]
