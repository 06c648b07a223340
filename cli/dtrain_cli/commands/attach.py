"""`dtrain attach`: show a run, and take charge of it if no launcher is in charge."""

from __future__ import annotations

from typing import Annotated

import typer

from dtrain import api
from dtrain.runs.status import find_run
from dtrain_cli.commands.select import filters_of_run
from dtrain_cli.commands.watch import Watch, exports
from dtrain_cli.parameters import (
    Fold,
    MetricsFile,
    MetricsPort,
    OnlyHosts,
    OnlyRanks,
    OpenRun,
    ScalarsFolder,
    ShowAs,
    Timestamps,
    flag,
)


def attach(
    run: OpenRun,
    rank: OnlyRanks = None,
    host: OnlyHosts = None,
    json: Annotated[bool, flag("One JSON object per event.", "--json")] = False,
    fold: Fold = False,
    timestamps: Timestamps = False,
    view: ShowAs = None,
    metrics_port: MetricsPort = None,
    metrics_file: MetricsFile = None,
    tensorboard_dir: ScalarsFolder = None,
) -> None:
    """Watch a run; Ctrl-C leaves it running."""
    folder = find_run(run)
    watch = Watch(
        stopping=False,
        json=json,
        filters=filters_of_run(rank, host, folder),
        fold=fold,
        timestamps=timestamps,
        display=view,
        exports=exports(metrics_port, metrics_file, tensorboard_dir),
    )
    code = watch.until_over(
        lambda: api.attach(
            folder.name, observer=watch.observer, control=watch.control, ask=watch.ask
        )
    )
    raise typer.Exit(code)
