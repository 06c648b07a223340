"""`dtrain launch`: start a job, stream its output, clean up; or print the launch plan."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dtrain import api
from dtrain.diagnostics import ExitCode, UsageError
from dtrain.engines.detachment import Detachment
from dtrain.loading import load
from dtrain.messages.decode import excerpt
from dtrain.session.secrets import secret_values
from dtrain.spec.report import render_warnings
from dtrain.wording import counted
from dtrain_cli.commands.select import filters
from dtrain_cli.declare import argument, flag, option
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
)

if TYPE_CHECKING:
    from dtrain.launchplan.plan import LaunchPlan

_RENDERED = re.compile(r"(?!\.\.?/)[A-Za-z0-9._:-]+/[a-z]+-[0-9]+\.(?:sh|env)|job\.(?:sbatch|yaml)")
"""Name patterns of the files that a dry run writes."""


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
    if spec.warnings and sys.stderr is not None:
        sys.stderr.write(render_warnings(spec.warnings))
    if dry_run:
        from dtrain.launchplan.build import build

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


def rendered(plan: LaunchPlan, *, json: bool = False, output: Path | None = None) -> str:
    """Return a dry run as text for stdout. With ``output``, write it into that folder instead.

    Uses no network and no clock, and returns the same bytes on every machine.
    """
    from dtrain.engines.render import batch_script
    from dtrain_cli.views import plan as view

    script = batch_script(plan)
    manifest = view.as_json(plan, script)
    if output is not None:
        count = _write(plan, script, manifest, output)
        if not json:
            files, hosts = counted(count, "file"), counted(len(plan.hosts), "host")
            return f"{files} for {hosts} written to {output}\n"
    if json:
        return manifest
    return "".join(script.values()) or view.as_text(plan)


def _write(plan: LaunchPlan, script: Mapping[str, str], manifest: str, output: Path) -> int:
    """Write one folder for each host or the batch script, and the plan itself. Remove files of an
    earlier plan that this plan does not have, so that a diff in CI shows the removal.

    ``output`` may come from a checkout, so follow no link out of it.
    """
    from dtrain.launchplan import shell

    marker = output / "plan.json"
    files = dict(script or shell.files(plan)) | {"plan.json": manifest}
    try:
        if output.is_dir() and any(output.iterdir()) and not marker.is_file():
            raise UsageError(
                f"{output}: not empty, and not written by an earlier dry run",
                hint="name a new folder",
            )
        for path in output.rglob("*"):
            if path.is_symlink():
                raise UsageError(
                    f"{path}: a link; a dry run writes only plain files",
                    hint="remove it, or name a new folder",
                )
        for path in [*output.glob("*/*"), *output.glob("job.*")]:
            if _RENDERED.fullmatch(str(path.relative_to(output))):
                path.unlink()
        for name, text in files.items():
            target = output / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(text.encode(errors="surrogateescape"))
            target.chmod(0o755 if name.endswith(".sh") else 0o644)
        for folder in output.iterdir():
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
    except OSError as error:
        raise UsageError(
            f"{error.filename or output}: cannot write the dry run: {error.strerror}",
            hint="name a folder that you can write to",
        ) from None
    return len(files) - 1
