"""`dtrain init`: write a first cluster file from a few answers and a probe of the hosts."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from dtrain import api
from dtrain.checks import Evidence
from dtrain.diagnostics import NodeError, SpecError, UsageError
from dtrain.engines.slurm import login_shell
from dtrain.engines.slurm.partitions import Partition
from dtrain.framing import clean
from dtrain.runs.request import Request
from dtrain.session.gather_order import Depth
from dtrain.spec.load import contents, parse
from dtrain.spec.model import Slurm
from dtrain.spec.source import MAX_SIZE
from dtrain.transport.select import Transports
from dtrain.wording import counted, either
from dtrain_cli import completion, first_file, first_slurm_file, output, prompt
from dtrain_cli.commands.select import unfolded
from dtrain_cli.declare import argument, flag, option
from dtrain_cli.files import writable, write_text
from dtrain_cli.output import notice, progress

_T = TypeVar("_T")

_OPTIONS = {
    "cluster.hosts": "--hosts",
    "cluster.ssh.user": "--user",
    "cluster.slurm.login": "--login",
    "job.script": "--script",
}
"""The options for keys of the file."""
_EXAMPLE = first_file.Answers(("gpu01",), "torch", "train.py")
_HOSTS = "Hosts, as ssh knows them (such as gpu[01-08])"
_FRAMEWORK = "Framework, torch or tensorflow"
_HOSTFILE = "name a file with a host on each line"
_SLOTS = re.compile(r"^([^:]+):[0-9]+$")
_SCRIPT = "Training script"
_SLURM = ", or --slurm for a Slurm cluster"


def init(
    file: Annotated[Path, argument("The file to write.", "FILE")] = Path("cluster.yaml"),
    hosts: Annotated[
        str | None, option("The machines, e.g. gpu[01-08], or a hostfile, e.g. ./hosts.", "HOSTS")
    ] = None,
    framework: Annotated[
        str | None, option("torch or tensorflow.", "NAME", completion.one_of("torch", "tensorflow"))
    ] = None,
    script: Annotated[str | None, option("The training script.", "FILE")] = None,
    user: Annotated[
        str | None, option("SSH user; default: from the SSH configuration.", "NAME")
    ] = None,
    probe: Annotated[bool | None, flag("Inspect the hosts over SSH; default: ask.")] = None,
    slurm: Annotated[bool, flag("For Slurm; the default where `sinfo` works.", "--slurm")] = False,
    login: Annotated[str | None, option("For Slurm: its login host, over SSH.", "HOST")] = None,
    partition: Annotated[str | None, option("For Slurm: the partition.", "NAME")] = None,
    nodes: Annotated[int | None, option("For Slurm: the number of machines.", "N")] = None,
    force: Annotated[bool, flag("Replace an existing file.", "--force")] = False,
) -> None:
    """Write a first cluster file from your answers."""
    if writable(file) and not force:
        raise UsageError(
            f"{str(file)!r} exists already", hint="name another file, or replace it with --force"
        )
    wanted = slurm or login is not None or partition is not None or nodes is not None
    for name, given in (("--hosts", hosts), ("--user", user), ("--probe", probe)):
        if wanted and given is not None:
            raise UsageError(
                f"{name} is for hosts that dtrain reaches over SSH; Slurm chooses its machines",
                hint=f"leave out {name}",
            )
    if wanted or (hosts is None and shutil.which("sinfo")):
        partitions = _partitions(login, file, required=wanted)
        if partitions:
            text = _for_slurm(partitions, file, framework, script, login, partition, nodes)
            _write(file, text)
            return
    answers = first_file.Answers(
        _ask("--hosts", hosts, _HOSTS, _hosts, or_else=_SLURM),
        _ask("--framework", framework, _FRAMEWORK, _framework, "torch"),
        _ask("--script", script, _SCRIPT, _script, "train.py"),
        user,
    )
    if probe is None:
        probe = _interactive() and typer.confirm("Inspect the hosts over SSH now?", default=True)
    evidence = _look(answers, file) if probe else None
    _write(file, first_file.text(answers, evidence), evidence.failures if evidence else ())


def _check(text: str) -> None:
    """Raise UsageError, with the option, for an answer that the file cannot contain."""
    try:
        parse(text, "")
    except SpecError as error:
        said = [error.problems[0].message, error.problems[0].hint]
        for key, option in _OPTIONS.items():
            said = [one.replace(key, option) for one in said]
        raise UsageError(said[0], hint=said[1]) from None


def _write(file: Path, text: str, failures: Sequence[NodeError] = ()) -> None:
    _check(text)
    write_text(file, text)
    message = f"{file} written\n"
    for failure in failures:
        message += f"not reached: {clean(failure.message)}\n"
    if failures:
        message += "fix that and write the file again (--force), or complete it yourself\n"
    if "CHANGE" in text:
        message += "edit the lines marked CHANGE\n"
    output.write(message + f"next: dtrain check {file}, then dtrain launch {file}\n")


def _partitions(login: str | None, file: Path, *, required: bool) -> tuple[Partition, ...]:
    """What Slurm says; empty if it says nothing and is not ``required``. Raises NodeError."""
    with closing(Transports(file.absolute().parent, prompt.asker(), notice)) as transport:
        try:
            with progress("asking Slurm for its partitions …"):
                return login_shell.partitions(transport, Slurm(login=login))
        except NodeError:
            if required:
                raise
            return ()


def _for_slurm(
    partitions: Sequence[Partition],
    file: Path,
    framework: str | None,
    script: str | None,
    login: str | None,
    partition: str | None,
    nodes: int | None,
) -> str:
    first = first_slurm_file.usual(partitions)
    if first is None:
        raise UsageError(
            "Slurm shows no partition that is UP and has machines", hint="`sinfo` lists them"
        )
    if partition is None and _interactive() and len(partitions) > 1:
        for line in first_slurm_file.summaries(partitions):
            typer.echo(clean(line), err=True)
        partition = _ask("--partition", None, "Partition", str, first.name)
    names = {one.name: one for one in partitions if one.machines}
    chosen = names.get(partition or first.name)
    if chosen is None:
        raise UsageError(
            f"--partition {partition}: there is no such partition with machines",
            hint=f"choose {either(names)}",
        )
    most = len(first_slurm_file.machines_alike(chosen))
    if nodes is None:
        nodes = min(2, most)
        if _interactive():
            nodes = typer.prompt(f"Machines, 1 to {most}", default=nodes, err=True, type=int)
    if not 1 <= nodes <= most:
        raise UsageError(
            f"--nodes {nodes}: partition {chosen.name} has {most} machines of one kind",
            hint=f"choose 1 to {most}",
        )
    answers = first_slurm_file.SlurmAnswers(
        chosen,
        nodes,
        _ask("--framework", framework, _FRAMEWORK, _framework, "torch"),
        _ask("--script", script, _SCRIPT, _script, "train.py"),
        login,
        str(file.absolute().parent),
    )
    return first_slurm_file.text(answers, partitions)


def _hosts(text: str) -> tuple[str, ...]:
    is_file = text.startswith(("/", "./", "../", "~")) or ("/" in text and Path(text).is_file())
    listed = _listed(text) if is_file else text
    hosts = unfolded("--hosts", listed)
    if listed is not text:  # Open MPI's hostfiles may repeat a host.
        hosts = tuple(dict.fromkeys(hosts))
    _check(first_file.text(replace(_EXAMPLE, hosts=hosts), None))
    return hosts


def _listed(hostfile: str) -> str:
    """The hosts of a hostfile, as a host list: the first word of each line, without its number of
    slots. So both ``gpu01 slots=8`` and ``gpu01:8`` are ``gpu01``."""
    path = Path(hostfile)
    with suppress(RuntimeError):  # There is no such user.
        path = path.expanduser()
    content = contents(path, "*host*", _HOSTFILE)
    if len(content) > MAX_SIZE:
        raise UsageError(f"{hostfile!r} is larger than {MAX_SIZE >> 10} KiB", hint=_HOSTFILE)
    lines = content.decode("utf-8-sig", "replace").splitlines()
    hosts = [words[0] for line in lines if (words := line.partition("#")[0].split())]
    if not hosts:
        raise UsageError(f"{hostfile!r} lists no host", hint=_HOSTFILE)
    return ",".join(_SLOTS.sub(r"\1", host) for host in hosts)


def _script(name: str) -> str:
    _check(first_file.text(replace(_EXAMPLE, script=name), None))
    return name


def _framework(name: str) -> str:
    if name not in ("torch", "tensorflow"):
        raise UsageError(f"--framework {name} is unknown", hint="use torch or tensorflow")
    return name


def _ask(
    option: str,
    given: str | None,
    question: str,
    read: Callable[[str], _T],
    default: str | None = None,
    or_else: str = "",
) -> _T:
    """What ``read`` makes of the option's value, or of the answer to the question. Asks again after
    an answer for which ``read`` raises UsageError."""
    if given:
        return read(given)
    if not _interactive():
        raise UsageError(
            f"{option} is missing",
            hint=f"set {option}{or_else}: without a terminal, dtrain cannot ask for it",
        )
    while True:
        answer: str = typer.prompt(question, default=default, err=True)
        try:
            return read(answer)
        except UsageError as error:
            hint = f" ({error.hint})" if error.hint else ""
            typer.echo(clean(f"{error.message}{hint}"), err=True)


def _interactive() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _look(answers: first_file.Answers, file: Path) -> Evidence:
    # The probe inspects GPUs only if the file has some.
    draft = first_file.text(answers, None).replace("gpus: 0", "gpus: 1", 1)
    _check(draft)
    request = Request(str(file), str(file.absolute().parent), draft)
    probes = ("machine", "names", "network", "infiniband", "gpus", "interpreter")
    with progress(f"inspecting {counted(len(answers.hosts), 'host')} …"):
        return api.examine(
            request, depth=Depth(probes, thorough=False), ask=prompt.asker(), on_notice=notice
        )
