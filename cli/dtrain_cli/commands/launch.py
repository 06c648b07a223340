"""`dtrain launch`: start a job, stream its output, clean up; or print the launch plan."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from dtrain import api
from dtrain.diagnostics import ExitCode, UsageError
from dtrain.engines.detachment import Detachment
from dtrain.loading import load
from dtrain.messages.decode import excerpt
from dtrain.spec.secrets import secret_values
from dtrain_cli.commands.select import filters
from dtrain_cli.errors import warn
from dtrain_cli.output import write
from dtrain_cli.parameters import (
    ClusterFilePath,
    Fold,
    MetricsFile,
    MetricsPort,
    OnlyHosts,
    OnlyRanks,
    ScalarsFolder,
    Settings,
    ShowAs,
    Timestamps,
    argument,
    flag,
    option,
)


def launch(
    file: ClusterFilePath,
    args: Annotated[
        list[str] | None, argument("Arguments for the script, after --.", "ARGS")
    ] = None,
    settings: Settings = None,
    dry_run: Annotated[
        bool, flag("Print what a launch would start; contact no host.", "--dry-run")
    ] = False,
    output: Annotated[
        Path | None,
        option(
            "With --dry-run: write a script and its environment for each process, or one "
            "batch script or manifest.",
            "DIR",
        ),
    ] = None,
    json: Annotated[
        bool, flag("JSON: the dry run's plan, or one event per line.", "--json")
    ] = False,
    rank: OnlyRanks = None,
    host: OnlyHosts = None,
    fold: Fold = False,
    timestamps: Timestamps = False,
    view: ShowAs = None,
    tensorboard: Annotated[
        bool, flag("Forward the job's TensorBoard to this machine.", "--tensorboard")
    ] = False,
    metrics_port: MetricsPort = None,
    metrics_file: MetricsFile = None,
    tensorboard_dir: ScalarsFolder = None,
    detach: Annotated[
        bool, flag("Continue in the background once all workers run.", "--detach", "-d")
    ] = False,
    no_check: Annotated[
        bool, flag("Start without checking the hosts first.", "--no-check")
    ] = False,
) -> None:
    """Start a job on all its hosts, stream its output, and clean up."""
    # click does not say which words came after --.
    after = sys.argv[sys.argv.index("--") + 1 :] if "--" in sys.argv else []
    if args and len(args) > len(after):
        raise UsageError(
            f"unexpected argument {excerpt(args[0])!r}: a launch takes one cluster file",
            hint="arguments for your own program go after --",
        )
    if output is not None and not dry_run:
        raise UsageError("--output requires --dry-run", hint="add --dry-run")
    # Other options of a launch stay: people add --dry-run to the command that they would run.
    if dry_run and (rank is not None or host is not None):
        raise UsageError(
            "--rank and --host select output of workers, and a dry run has none",
            hint="remove them; `--output DIR` writes a folder for each host",
        )
    # `dtrain.runtime` starts the TensorBoard that a script asks for only with this option.
    env = {"DTRAIN_TENSORBOARD": "1"} if tensorboard else {}
    request = load(file, settings=settings or (), args=args or (), env=env)
    spec = request.spec()
    warn(spec)
    if dry_run:
        from dtrain.launchplan.build import build
        from dtrain_cli.dry_run import rendered

        write(rendered(build(spec), json=json, output=output))
        return
    chosen = filters(rank, host, spec)
    secrets = secret_values(spec, os.environ)
    detachment = Detachment() if detach else None
    if detachment is not None and not detachment.in_background:
        raise typer.Exit(_await_start(detachment, json=json))
    # A dry run needs none of a session's threads and transports, so import them only here.
    from dtrain_cli.commands.watch import Watch, exports

    watch = Watch(
        stopping=True,
        json=json,
        filters=chosen,
        fold=fold,
        timestamps=timestamps,
        detachment=detachment,
        display=view,
        exports=exports(metrics_port, metrics_file, tensorboard_dir),
    )
    if spec.job.strategy_reason:
        watch.view.notice(f"strategy auto is {spec.job.strategy}: {spec.job.strategy_reason}")
    code = watch.until_over(
        lambda: api.launch(
            request,
            secrets=secrets,
            check=not no_check,
            on_running=watch.running,
            control=watch.control,
            observer=watch.observer,
            ask=watch.ask,
        )
    )
    raise typer.Exit(code)


def _await_start(detachment: Detachment, *, json: bool) -> ExitCode:
    """Wait until the process in the background has started all workers, or failed."""
    begun = detachment.wait()
    if isinstance(begun, ExitCode):
        return begun
    sys.stderr.write(
        f"dtrain: continuing in the background; `dtrain attach {begun}` shows the run,"
        f" `dtrain stop {begun}` stops it\n"
    )
    if not json:
        sys.stdout.write(f"{begun}\n")
    return ExitCode.OK
