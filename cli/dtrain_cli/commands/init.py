"""`dtrain init`: write a first cluster file from a few answers and a probe of the hosts."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, TypeVar, get_args

import typer

from dtrain.checks import Evidence
from dtrain.diagnostics import NodeError, SpecError, UsageError
from dtrain.engines.inspection import examine
from dtrain.engines.kubernetes.machines import KubernetesMachine, Vendor, left_out, with_gpus
from dtrain.engines.slurm import login_shell
from dtrain.engines.slurm.partitions import Partition
from dtrain.framing import clean
from dtrain.runs.request import Request
from dtrain.session.facts.gather_order import Depth
from dtrain.spec.load import contents, parse
from dtrain.spec.model import Framework, Slurm
from dtrain.spec.source import MAX_SIZE
from dtrain.transport.select import Transports
from dtrain.wording import counted, either
from dtrain_cli import (
    completion,
    first_file,
    first_kubernetes_file,
    first_slurm_file,
    output,
    prompt,
)
from dtrain_cli.commands.select import unfolded
from dtrain_cli.files import writable, write_text
from dtrain_cli.output import notice, progress
from dtrain_cli.parameters import argument, flag, option

_T = TypeVar("_T")

_OPTIONS = {
    "cluster.hosts": "--hosts",
    "cluster.gpus": "--gpus",
    "cluster.ssh.user": "--user",
    "cluster.slurm.login": "--login",
    "cluster.kubernetes.image": "--image",
    "cluster.nodes": "--nodes",
    "job.script": "--script",
    "job.module": "--script",
}
"""The options for keys of the file."""
_EXAMPLE = first_file.Answers(("gpu01",), "torch", "train.py", gpus=1)
_HOSTS = "Hosts, as ssh knows them (such as gpu[01-08]; for Kubernetes, use --image)"
_FRAMEWORKS: tuple[str, ...] = get_args(Framework)
_FRAMEWORK = f"Framework, {either(_FRAMEWORKS)}"
_HOSTFILE = "name a file with a host on each line"
_SLOTS = re.compile(r"(?:([^:]+):|slots=)([0-9]+)")
_SCRIPT = "Training script"
_PROBE = "Inspect the hosts over SSH now, yes or no"
_GPUS = "GPUs of each host"
_OTHERS = ", or --slurm for a Slurm cluster, or --image for Kubernetes"


def init(
    file: Annotated[Path, argument("The file to write.", "FILE")] = Path("cluster.yaml"),
    hosts: Annotated[
        str | None, option("The machines, e.g. gpu[01-08], or a hostfile, e.g. ./hosts.", "HOSTS")
    ] = None,
    framework: Annotated[
        str | None,
        option(f"{either(_FRAMEWORKS)}.", "NAME", completion.one_of(*_FRAMEWORKS)),
    ] = None,
    script: Annotated[str | None, option("The training script, or '-m MODULE'.", "FILE")] = None,
    user: Annotated[
        str | None, option("SSH user; default: from the SSH configuration.", "NAME")
    ] = None,
    gpus: Annotated[
        int | None,
        option("GPUs of each host; default: the probe, or the hostfile's slots.", "N"),
    ] = None,
    probe: Annotated[bool | None, flag("Inspect the hosts over SSH; default: ask.")] = None,
    slurm: Annotated[bool, flag("For Slurm; the default where `sinfo` works.", "--slurm")] = False,
    login: Annotated[str | None, option("For Slurm: its login host, over SSH.", "HOST")] = None,
    partition: Annotated[str | None, option("For Slurm: the partition.", "NAME")] = None,
    image: Annotated[str | None, option("For Kubernetes: the image of the pods.", "IMAGE")] = None,
    nodes: Annotated[
        int | None, option("For Slurm and Kubernetes: the number of machines.", "N")
    ] = None,
    force: Annotated[bool, flag("Replace an existing file.", "--force")] = False,
) -> None:
    """Write a first cluster file from your answers."""
    if writable(file) and not force:
        raise UsageError(
            f"{str(file)!r} exists already", hint="name another file, or replace it with --force"
        )
    if image is not None:
        given = {"--hosts": hosts, "--user": user, "--login": login, "--partition": partition}
        others = [name for name, value in given.items() if value is not None]
        others += ["--slurm"] * slurm + ["--probe"] * (probe is not None)
        if others:
            raise UsageError(
                f"{others[0]} is not for Kubernetes, which chooses the machines",
                hint=f"leave out {others[0]}, or --image",
            )
        text = _for_kubernetes(image, framework, script, gpus, nodes)
        _check(text)
        _write(file, text)
        return
    wanted = slurm or login is not None or partition is not None or nodes is not None
    options = {"--hosts": hosts, "--user": user, "--gpus": gpus, "--probe": probe}
    over_ssh = [name for name, given in options.items() if given is not None]
    if wanted and over_ssh:
        raise UsageError(
            f"{over_ssh[0]} is for hosts that dtrain reaches over SSH; Slurm chooses its machines",
            hint=f"leave out {over_ssh[0]}",
        )
    if wanted or (not over_ssh and shutil.which("sinfo")):
        partitions = _partitions(login, file, required=wanted)
        if partitions:
            text = _for_slurm(partitions, file, framework, script, login, partition, nodes)
            _check(text)
            _write(file, text)
            return
    named, slots = _ask("--hosts", hosts, _HOSTS, _hosts, or_else=_OTHERS)
    answers = first_file.Answers(
        named,
        _ask("--framework", framework, _FRAMEWORK, _framework, "torch"),
        _ask("--script", script, _SCRIPT, _script, "train.py"),
        user,
        None if gpus is None else _gpus(str(gpus)),
        slots,
    )
    # The probe inspects GPUs only if the file has some.
    draft = first_file.text(replace(answers, gpus=answers.gpus or 1), None)
    _check(draft)
    if probe is None:
        probe = _interactive() and _ask("--probe", None, _PROBE, _yes, "yes")
    evidence = _look(draft, len(named), file) if probe else None
    if answers.gpus is None and slots is None and not probe and _interactive():
        answers = replace(answers, gpus=_ask("--gpus", None, _GPUS, _gpus))
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
        except NodeError as error:
            if not required:
                return ()
            error.hint = error.hint.replace("cluster.slurm.login", "--login")
            raise


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
            nodes = _ask("--nodes", None, f"Machines, 1 to {most}", _number, str(nodes))
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


def _for_kubernetes(
    image: str, framework: str | None, script: str | None, gpus: int | None, nodes: int | None
) -> str:
    vendor: Vendor = "nvidia"
    machines: list[KubernetesMachine] = []
    draft = first_kubernetes_file.KubernetesAnswers(image, 1, gpus or 1, "torch", "train.py")

    def read_nodes(text: str) -> int:
        count = _number(text)
        _check(first_kubernetes_file.text(replace(draft, nodes=count), machines, vendor))
        return count

    read_nodes("1")  # for the image
    try:
        with progress("asking the cluster for its machines …"):
            vendor, found = with_gpus()
        if without := left_out(found):
            notice(without)
        machines = [one for one in found if not one.obstacle]
        most = max((one.gpus for one in machines), default=0)
        if not most:
            notice("the cluster has no machines with whole GPUs that pods may use")
        elif most < (gpus or 0):
            notice(f"no machine of the cluster has {gpus} GPUs: the most that one has is {most}")
    except (UsageError, NodeError) as error:
        notice(f"the GPUs of the machines are not known: {error.message}")
    if gpus is None and not machines:
        gpus = _ask("--gpus", None, "GPUs of each pod", _gpus)
    wanted = None if nodes is None else str(nodes)
    answers = first_kubernetes_file.KubernetesAnswers(
        image,
        _ask("--nodes", wanted, "Machines", read_nodes, str(min(2, len(machines) or 2))),
        gpus,
        _ask("--framework", framework, _FRAMEWORK, _framework, "torch"),
        _ask("--script", script, _SCRIPT, _script, "train.py"),
    )
    return first_kubernetes_file.text(answers, machines, vendor)


def _hosts(text: str) -> tuple[tuple[str, ...], int | None]:
    """The hosts, and how many slots each has: None if that is unknown or differs."""
    is_file = text.startswith(("/", "./", "../", "~")) or ("/" in text and Path(text).is_file())
    listed, slots = _listed(text) if is_file else (text, None)
    hosts = unfolded("--hosts", listed)
    if is_file:  # Open MPI's hostfiles may repeat a host.
        hosts = tuple(dict.fromkeys(hosts))
    _check(first_file.text(replace(_EXAMPLE, hosts=hosts), None))
    return hosts, slots


def _listed(hostfile: str) -> tuple[str, int | None]:
    """The hosts of a hostfile, as a host list, and their number of slots if it is the same. Lines
    are such as ``gpu01 slots=8`` and ``gpu01:8``."""
    path = Path(hostfile)
    with suppress(RuntimeError):  # There is no such user.
        path = path.expanduser()
    content = contents(path, "*host*", _HOSTFILE)
    if len(content) > MAX_SIZE:
        raise UsageError(f"{hostfile!r} is larger than {MAX_SIZE >> 10} KiB", hint=_HOSTFILE)
    lines = content.decode("utf-8-sig", "replace").splitlines()
    hosts: list[str] = []
    slots: set[int | None] = set()
    for words in filter(None, (line.partition("#")[0].split() for line in lines)):
        found = [match for word in words if (match := _SLOTS.fullmatch(word))]
        hosts.append(next((match[1] for match in found if match[1]), words[0]))
        slots.add(int(found[0][2]) if found else None)
    if not hosts:
        raise UsageError(f"{hostfile!r} lists no host", hint=_HOSTFILE)
    return ",".join(hosts), slots.pop() if len(slots) == 1 else None


def _script(name: str) -> str:
    if " " in name.removeprefix("-m ") and not name.endswith((".py", ".sh")):
        raise UsageError(
            f"--script {name} is not one file",
            hint="name the file alone, or a module: '-m my.train'; write job.args or job.command "
            "into the cluster file",
        )
    _check(first_file.text(replace(_EXAMPLE, script=name), None))
    return name


def _framework(name: str) -> str:
    if name not in _FRAMEWORKS:
        raise UsageError(f"--framework {name} is unknown", hint=f"use {either(_FRAMEWORKS)}")
    return name


def _number(text: str) -> int:
    if not re.fullmatch("-?[0-9]{1,9}", text):
        raise UsageError(f"{text!r} is not a number")
    return int(text)


def _gpus(text: str) -> int:
    _check(first_file.text(replace(_EXAMPLE, gpus=_number(text)), None))
    return int(text)


def _yes(text: str) -> bool:
    if text.lower() not in ("y", "yes", "n", "no"):
        raise UsageError("answer yes or no")
    return text.lower() in ("y", "yes")


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


def _look(draft: str, hosts: int, file: Path) -> Evidence:
    request = Request(str(file), str(file.absolute().parent), draft)
    probes = ("machine", "names", "network", "infiniband", "gpus", "interpreter")
    with progress(f"inspecting {counted(hosts, 'host')} …"):
        return examine(
            request, depth=Depth(probes, thorough=False), ask=prompt.asker(), on_notice=notice
        )
