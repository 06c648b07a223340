"""`dtrain init`: a first cluster file, from a few answers and a look at the hosts."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import typer

from dtrain import hostlist
from dtrain.check import Evidence
from dtrain.diagnostics import UsageError
from dtrain.framing import clean
from dtrain.launchplan import build
from dtrain.spec.load import parse
from dtrain_cli import first_file
from dtrain_cli.commands.check import asker, notice, progress
from dtrain_cli.files import write_text
from dtrain_cli.views import names


@dataclass(frozen=True, slots=True)
class Options:
    """The command line of `dtrain init`; None where an option is absent."""

    file: Path
    hosts: str | None
    framework: str | None
    script: str | None
    user: str | None
    probe: bool | None
    force: bool


def init(options: Options) -> str:
    """Write the file; what to do next, as text for stdout.

    Raises UsageError if the file exists already, if an answer is missing and nobody is there to
    ask, or if the answers make no cluster file.
    """
    if options.file.exists() and not options.force:
        raise UsageError(
            f"{str(options.file)!r} exists already",
            hint="name another file, or replace it with --force",
        )
    answers = _answers(options)
    probe = options.probe
    if probe is None:
        probe = _interactive() and typer.confirm("Look at the hosts over SSH now?", default=True)
    evidence = _look(answers, options.file) if probe else None
    text = first_file.text(answers, evidence)
    parse(text, str(options.file))  # what is written here can be launched
    write_text(options.file, text)
    unreached = [failure.host for failure in evidence.failures] if evidence else []
    said = f"{options.file} written\n"
    for failure in evidence.failures if evidence else ():
        said += f"not reached: {clean(failure.message)}\n"
    if unreached:
        said += f"correct that, then look again: dtrain check {options.file}\n"
    elif "CHANGE" in text:
        said += "change what is marked CHANGE in it\n"
    return said + f"next: dtrain check {options.file}, then dtrain launch {options.file}\n"


def _answers(options: Options) -> first_file.Answers:
    hosts = options.hosts or _ask("--hosts", "Hosts, as ssh knows them (such as gpu[01-08])")
    try:
        unfolded = hostlist.unfold(hosts)
    except hostlist.HostListError as error:
        raise UsageError(f"--hosts {hosts}: {error}", hint=error.hint) from None
    framework = options.framework or _ask("--framework", "Framework, torch or tensorflow", "torch")
    if framework not in ("torch", "tensorflow"):
        raise UsageError(f"--framework {framework}: known are torch and tensorflow")
    script = options.script or _ask("--script", "Training script", "train.py")
    return first_file.Answers(unfolded, framework, script, options.user)


def _ask(option: str, question: str, default: str | None = None) -> str:
    if not _interactive():
        raise UsageError(
            f"{option} is missing", hint=f"give {option}: there is no terminal to ask on"
        )
    answer: str = typer.prompt(question, default=default, err=True)
    return answer


def _interactive() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _look(answers: first_file.Answers, file: Path) -> Evidence:
    from dtrain.session.preflight import Depth, Preflight, over
    from dtrain.transport.select import Transports

    # One GPU makes the look ask about GPUs.
    draft = first_file.text(answers, None).replace("gpus: 0", "gpus: 1", 1)
    plan = build(parse(draft, str(file)), local_python=sys.executable)
    base = file.absolute().parent
    transport = Transports(base, asker(), notice=notice)
    preflight = Preflight(plan, over(transport), base=base)
    probes = ("machine", "names", "network", "infiniband", "gpus", "interpreter")
    try:
        with progress(f"looking at {names.count(len(plan.hosts), 'host')} …"):
            return preflight.look(Depth(probes, thorough=False))
    finally:
        preflight.close()
        transport.close()
