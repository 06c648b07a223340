"""`dtrain launch`: start, stream, clean up; or show what would be started."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from dtrain import hostlist
from dtrain.diagnostics import DtrainError, ExitCode, UsageError
from dtrain.launchplan import LaunchPlan, build
from dtrain.spec.load import read
from dtrain.spec.model import ClusterFile
from dtrain.spec.report import render_warnings
from dtrain_cli import passphrase
from dtrain_cli.views import Filters, View, make_view

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_RENDERED = re.compile(r"(?!\.\.?/)[A-Za-z0-9._:-]+/[a-z]+-[0-9]+\.(?:sh|env)")
"""What a dry run names its files."""


@dataclass(frozen=True, slots=True)
class Options:
    """The command line of `dtrain launch`."""

    file: Path
    args: Sequence[str]
    """Added to ``job.args``."""
    json: bool
    fold: bool
    ranks: str | None
    hosts: str | None
    tensorboard: bool


def launch(options: Options) -> ExitCode:
    """Run the job of a cluster file until nothing of it is left; returns the exit code."""
    spec = _spec(options)
    filters = Filters(_ranks(options.ranks, spec), _hosts(options.hosts, spec))
    secrets = _secret_values(spec)

    # Session brings threads and transports, which a dry run and `--help` have no use for.
    from dtrain.session.controller import Session
    from dtrain.transport.select import Transports

    view = make_view(
        options.json,
        sys.stdout,
        sys.stderr,
        filters,
        options.fold,
        on_broken_pipe=lambda: session.hang_up("nobody reads its output"),
    )
    base = options.file.absolute().parent
    transport = Transports(
        base, _asker(view, cancelled=lambda: session.interrupted), notice=view.notice
    )
    session = Session(
        spec,
        base=base,
        transport=transport,
        observer=view,
        secret_values=secrets,
        tensorboard=options.tensorboard,
    )
    over = False

    def on_signal(number: int) -> None:
        if over:
            view.hurry()
        elif number == signal.SIGHUP:
            session.hang_up("its terminal was closed")
        else:
            session.interrupt("Ctrl-C" if number == signal.SIGINT else "SIGTERM")

    with _on_signals(on_signal):
        try:
            for text in (*_chosen(spec), *_not_acted_on(spec)):
                view.notice(text)
            report = session.run()
            over = True
            while not view.wait(0.5):
                pass
        except DtrainError:
            with view.pause():
                raise
        finally:
            transport.close()
    return report.exit_code


def dry_run(options: Options, output: Path | None) -> str:
    """What a launch would execute, as text for stdout; written into ``output`` if given.

    Touches no network and no clock, and gives the same bytes wherever it runs.
    """
    from dtrain_cli.views import plan as plan_view

    spec = _spec(options)
    plan = build(spec)
    if output is not None:
        count = _write(plan, plan_view.as_json(plan), output)
        if not options.json:
            return f"{count} files for {len(plan.hosts)} hosts written to {output}\n"
    return plan_view.as_json(plan) if options.json else plan_view.as_text(plan)


def _spec(options: Options) -> ClusterFile:
    """The cluster file, and its warnings on stderr."""
    spec = read(options.file)
    if spec.warnings and sys.stderr is not None:
        sys.stderr.write(render_warnings(spec.warnings))
    # A script asks for a TensorBoard through `dtrain.runtime`, which starts one only if told to.
    wanted = {"DTRAIN_TENSORBOARD": "1"} if options.tensorboard else {}
    job = replace(spec.job, args=(*spec.job.args, *options.args), env={**spec.job.env, **wanted})
    return replace(spec, job=job)


def _ranks(text: str | None, spec: ClusterFile) -> frozenset[int] | None:
    """``0,4-7`` as a set of the job's ranks."""
    if text is None:
        return None
    if spec.job.framework != "torch":
        raise UsageError(
            "--rank is for torch: TensorFlow's tasks have none", hint="choose hosts with --host"
        )
    last_rank = build(spec).world_size - 1
    ranks: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not (last.isdecimal() and int(first) <= int(last))):
            raise UsageError(f"--rank {text}: {part!r} is no rank", hint="write e.g. --rank 0,4-7")
        if int(last or first) > last_rank:
            raise UsageError(f"--rank {text}: this job's ranks are 0-{last_rank}")
        ranks.update(range(int(first), int(last or first) + 1))
    return frozenset(ranks)


def _hosts(text: str | None, spec: ClusterFile) -> frozenset[str] | None:
    """``gpu[01-03]`` as a set of the file's hosts."""
    if text is None:
        return None
    try:
        wanted = hostlist.unfold(text)
    except hostlist.HostListError as error:
        raise UsageError(f"--host {text}: {error}") from None
    known = [host.name for host in spec.cluster.hosts]
    if unknown := [name for name in wanted if name not in known]:
        raise UsageError(
            f"--host {text}: no host {hostlist.fold(unknown)} in this cluster",
            hint=f"its hosts are {hostlist.fold(known)}",
        )
    return frozenset(wanted)


def _secret_values(spec: ClusterFile) -> dict[str, str]:
    if missing := [name for name in spec.job.secrets if name not in os.environ]:
        raise UsageError(
            f"job.secrets names {', '.join(missing)}, which this environment does not have",
            hint=f"export {missing[0]} before launching",
        )
    return {name: os.environ[name] for name in spec.job.secrets}


def _chosen(spec: ClusterFile) -> Iterator[str]:
    """What ``strategy: auto`` came to."""
    if spec.job.strategy_reason:
        yield f"strategy auto is {spec.job.strategy}: {spec.job.strategy_reason}"


def _not_acted_on(spec: ClusterFile) -> Iterator[str]:
    """What the file asks for and this version does not do, rather than ignore it silently."""
    if spec.job.restart.max:
        yield "job.restart is not acted on in this version: the job ends at its first failure"
    if spec.cluster.spares:
        yield "cluster.spares is not acted on in this version: no host is replaced"


def _asker(view: View, cancelled: Callable[[], bool]) -> Callable[[str], str | None] | None:
    """How to ask for a passphrase; None where nobody is there to answer."""
    if not sys.stdin or not sys.stdin.isatty():
        return None

    def ask(prompt: str) -> str | None:
        with view.pause():
            return passphrase.ask(prompt, cancelled)

    return ask


@contextmanager
def _on_signals(act: Callable[[int], None]) -> Iterator[None]:
    """Have Ctrl-C, a polite kill and a closed terminal all end the launch in good order."""
    before = {number: signal.getsignal(number) for number in _STOP_SIGNALS}
    for number in _STOP_SIGNALS:
        # nohup's choice to outlive the terminal is kept.
        if before[number] is not signal.SIG_IGN:
            signal.signal(number, lambda number, _frame: act(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
