"""`dtrain init`: write a first cluster file from a few answers and a probe of the hosts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from dtrain import hostlist
from dtrain.checks import Evidence
from dtrain.diagnostics import UsageError
from dtrain.framing import clean
from dtrain.launchplan.plan import build
from dtrain.session.gather_order import Depth
from dtrain.session.preflight import Preflight, over
from dtrain.spec.load import parse
from dtrain.transport.select import Transports
from dtrain_cli import completion, first_file, output, prompt
from dtrain_cli.commands.check import notice, progress
from dtrain_cli.files import write_text
from dtrain_cli.views import names


def init(
    file: Annotated[Path, typer.Argument(help="The file to write.", metavar="[FILE]")] = Path(
        "cluster.yaml"
    ),
    hosts: Annotated[
        str | None, typer.Option(help="The machines, e.g. gpu[01-08].", metavar="HOSTS")
    ] = None,
    framework: Annotated[
        str | None,
        typer.Option(
            help="torch or tensorflow.",
            metavar="NAME",
            autocompletion=completion.one_of("torch", "tensorflow"),
        ),
    ] = None,
    script: Annotated[str | None, typer.Option(help="The training script.", metavar="FILE")] = None,
    user: Annotated[
        str | None, typer.Option(help="SSH user (default: from ssh config).", metavar="NAME")
    ] = None,
    probe: Annotated[
        bool | None,
        typer.Option("--probe/--no-probe", help="Inspect the hosts over SSH; default: ask."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Write a first cluster file from your answers."""
    if file.exists() and not force:
        raise UsageError(
            f"{str(file)!r} exists already",
            hint="name another file, or replace it with --force",
        )
    answers = first_file.Answers(
        _hosts(hosts or _ask("--hosts", "Hosts, as ssh knows them (such as gpu[01-08])")),
        _framework(framework or _ask("--framework", "Framework, torch or tensorflow", "torch")),
        script or _ask("--script", "Training script", "train.py"),
        user,
    )
    if probe is None:
        probe = _interactive() and typer.confirm("Inspect the hosts over SSH now?", default=True)
    evidence = _look(answers, file) if probe else None
    text = first_file.text(answers, evidence)
    parse(text, str(file))  # fail now rather than at the launch
    write_text(file, text)
    unreached = [failure.host for failure in evidence.failures] if evidence else []
    message = f"{file} written\n"
    for failure in evidence.failures if evidence else ():
        message += f"not reached: {clean(failure.message)}\n"
    if unreached:
        message += f"fix that, then run: dtrain check {file}\n"
    elif "CHANGE" in text:
        message += "edit the lines marked CHANGE\n"
    output.write(message + f"next: dtrain check {file}, then dtrain launch {file}\n")


def _hosts(text: str) -> tuple[str, ...]:
    try:
        return hostlist.unfold(text)
    except hostlist.HostListError as error:
        raise UsageError(f"--hosts {text}: {error}", hint=error.hint) from None


def _framework(name: str) -> str:
    if name not in ("torch", "tensorflow"):
        raise UsageError(f"--framework {name} is unknown", hint="use torch or tensorflow")
    return name


def _ask(option: str, question: str, default: str | None = None) -> str:
    if not _interactive():
        raise UsageError(
            f"{option} is missing",
            hint=f"set {option}: without a terminal, dtrain cannot ask for it",
        )
    answer: str = typer.prompt(question, default=default, err=True)
    return answer


def _interactive() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _look(answers: first_file.Answers, file: Path) -> Evidence:
    # The probe inspects GPUs only if the file has some.
    draft = first_file.text(answers, None).replace("gpus: 0", "gpus: 1", 1)
    plan = build(parse(draft, str(file)), local_python=sys.executable)
    base = file.absolute().parent
    transport = Transports(base, prompt.asker(), notice=notice)
    preflight = Preflight(plan, over(transport), base=base)
    probes = ("machine", "names", "network", "infiniband", "gpus", "interpreter")
    try:
        with progress(f"inspecting {names.count(len(plan.hosts), 'host')} …"):
            return preflight.look(Depth(probes, thorough=False))
    finally:
        preflight.close()
        transport.close()
