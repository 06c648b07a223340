"""`dtrain launch`: start, stream, clean up; or show what would be started."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dtrain.diagnostics import ExitCode, UsageError
from dtrain.launchplan import LaunchPlan, build
from dtrain.record import Request
from dtrain.spec.load import contents
from dtrain.spec.model import ClusterFile
from dtrain.spec.report import render_warnings
from dtrain_cli.commands.secrets import secret_values
from dtrain_cli.commands.select import hosts, ranks
from dtrain_cli.detachment import Detachment
from dtrain_cli.views import Filters

_RENDERED = re.compile(r"(?!\.\.?/)[A-Za-z0-9._:-]+/[a-z]+-[0-9]+\.(?:sh|env)")
"""What a dry run names its files."""


@dataclass(frozen=True, slots=True)
class Options:
    """The command line of `dtrain launch`."""

    file: Path
    args: Sequence[str] = ()
    """Added to ``job.args``."""
    json: bool = False
    fold: bool = False
    ranks: str | None = None
    hosts: str | None = None
    tensorboard: bool = False
    detach: bool = False
    check: bool = True
    """Whether to look at the hosts before anything is prepared on them."""


def launch(options: Options) -> ExitCode:
    """Run the job of a cluster file until nothing of it is left; returns the exit code.

    With ``detach``, until all workers have been started: the launch goes on in the background.
    """
    request, spec = _request(options)
    filters = Filters(ranks(options.ranks, spec), hosts(options.hosts, spec))
    secrets = secret_values(spec)
    if not options.detach:
        return _launch(options, request, filters, secrets, Detachment.none())
    detachment = Detachment()
    if detachment.in_background:
        raise SystemExit(_launch(options, request, filters, secrets, detachment))
    begun = detachment.wait()
    if isinstance(begun, ExitCode):
        return begun
    sys.stderr.write(
        f"dtrain: it goes on in the background; `dtrain attach {begun}` shows it,"
        f" `dtrain stop {begun}` ends it\n"
    )
    if not options.json:
        sys.stdout.write(f"{begun}\n")
    return ExitCode.OK


def _launch(
    options: Options,
    request: Request,
    filters: Filters,
    secrets: dict[str, str],
    detachment: Detachment,
) -> ExitCode:
    # A session brings threads and transports, which a dry run and `--help` have no use for.
    from dtrain_cli.commands.watch import Watch

    with Watch(request, options.json, filters, options.fold, detachment) as watch:
        spec = request.spec()
        if spec.job.strategy_reason:
            watch.view.notice(f"strategy auto is {spec.job.strategy}: {spec.job.strategy_reason}")
        return watch.until_over(lambda session: session.run(secrets), stopping=True)


def dry_run(options: Options, output: Path | None) -> str:
    """What a launch would execute, as text for stdout; written into ``output`` if given.

    Touches no network and no clock, and gives the same bytes wherever it runs.
    """
    from dtrain_cli.views import plan as plan_view

    _, spec = _request(options)
    plan = build(spec)
    if output is not None:
        count = _write(plan, plan_view.as_json(plan), output)
        if not options.json:
            return f"{count} files for {len(plan.hosts)} hosts written to {output}\n"
    return plan_view.as_json(plan) if options.json else plan_view.as_text(plan)


def _request(options: Options) -> tuple[Request, ClusterFile]:
    """What is asked for, and what it comes to; the file's warnings go to stderr."""
    # A script asks for a TensorBoard through `dtrain.runtime`, which starts one only if told to.
    wanted = {"DTRAIN_TENSORBOARD": "1"} if options.tensorboard else {}
    request = Request(
        file=str(options.file),
        folder=str(options.file.absolute().parent),
        text=contents(options.file).decode(errors="surrogateescape"),
        args=tuple(options.args),
        env=wanted,
        check=options.check,
    )
    spec = request.spec()
    if spec.warnings and sys.stderr is not None:
        sys.stderr.write(render_warnings(spec.warnings))
    return request, spec


def _write(plan: LaunchPlan, manifest: str, output: Path) -> int:
    """Write one folder for each host, and the plan itself; files of an earlier plan that are no
    longer part of it are removed, so that a CI's diff shows them gone.

    ``output`` may come with a checkout, so nothing in it leads the way out of it.
    """
    from dtrain.export import shell

    marker = output / "plan.json"
    files = dict(shell.files(plan)) | {"plan.json": manifest}
    try:
        if output.is_dir() and any(output.iterdir()) and not marker.is_file():
            raise UsageError(
                f"{output}: not empty, and not written by an earlier dry run",
                hint="name a new folder",
            )
        for path in output.rglob("*"):
            if path.is_symlink():
                raise UsageError(
                    f"{path}: a link, which no dry run writes",
                    hint="remove it, or name a new folder",
                )
        for path in list(output.glob("*/*")):
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
