"""`dtrain attach`: show a run, and take charge of it if no launcher is in charge."""

from __future__ import annotations

from typing import Annotated

import typer

from dtrain import api
from dtrain_cli.commands.watch import Watch, exports
from dtrain_cli.parameters import (
    Fold,
    MetricsFile,
    MetricsPort,
    OpenRun,
    ScalarsFolder,
    ShowAs,
)


def attach(
    run: OpenRun,
    json: Annotated[bool, typer.Option("--json", help="One JSON object per event.")] = False,
    fold: Fold = False,
    view: ShowAs = None,
    metrics_port: MetricsPort = None,
    metrics_file: MetricsFile = None,
    tensorboard_dir: ScalarsFolder = None,
) -> None:
    """Watch a run; Ctrl-C leaves it running."""
    watch = Watch(
        stopping=False,
        json=json,
        fold=fold,
        display=view,
        exports=exports(metrics_port, metrics_file, tensorboard_dir),
    )
    code = watch.until_over(
        lambda: api.attach(run, observer=watch.observer, control=watch.control, ask=watch.ask)
    )
    raise typer.Exit(code)
