"""The text of a first cluster file for Slurm, from the user's answers and what Slurm says. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import mode

from dtrain.engines.slurm.judgement import duration
from dtrain.engines.slurm.partitions import Partition, SlurmMachine
from dtrain.records import dataclass
from dtrain.spec.yaml_text import literal
from dtrain.wording import counted
from dtrain_cli.first_file import in_table, program

DAY = 86400.0
"""The time limit of a first file, unless the partition allows less."""


@dataclass(frozen=True, slots=True)
class SlurmAnswers:
    """What only the user knows."""

    partition: Partition
    nodes: int
    framework: str
    script: str
    login: str | None
    folder: str
    """The file's folder, where the job runs if it is submitted here."""


def usual(partitions: Sequence[Partition]) -> Partition | None:
    """The default partition, if it has GPUs; else the one with the most machines with GPUs."""
    up = [one for one in partitions if one.state == "UP" and one.machines and not one.hidden]
    if not up:
        return None
    with_gpus = [one for one in up if one.gpu_types] or up
    return max(with_gpus, key=lambda one: (one.default, sum(m.count() > 0 for m in one.machines)))


def text(answers: SlurmAnswers, partitions: Sequence[Partition]) -> str:
    chosen = answers.partition
    alike = machines_alike(chosen)
    slurm = ", ".join(_request(answers, alike))
    return "\n".join(
        [
            "# Written by `dtrain init`. Show the job that a launch would submit:",
            "#   dtrain launch FILE --dry-run",
            "# Check the request, and the machines if some are free:",
            "#   dtrain check FILE",
            "#",
            "# Partitions of this cluster:",
            *(f"#   {line}" for line in summaries(partitions)),
            "cluster:",
            f"  slurm: {{{slurm}}}",
            f"  nodes: {answers.nodes}  # of {len(alike)} such machines",
            *_devices(alike),
            "",
            "job:",
            f"  framework: {answers.framework}",
            f"  {program(answers.script)}",
            *_workdir(answers),
            "",
        ]
    )


def machines_alike(partition: Partition) -> tuple[SlurmMachine, ...]:
    """The machines of the most common kind: the same GPUs and CPUs."""

    def kind(machine: SlurmMachine) -> tuple[object, ...]:
        return (*sorted(machine.gpus.items()), machine.cpus)

    with_gpus = [machine for machine in partition.machines if machine.gpus]
    most = mode(kind(machine) for machine in with_gpus or partition.machines)
    return tuple(machine for machine in partition.machines if kind(machine) == most)


def summaries(partitions: Sequence[Partition]) -> Iterator[str]:
    """One line for each partition that a site shows."""
    for one in (each for each in partitions if not each.hidden):
        name = one.name + (" (default)" if one.default else "")
        if not one.machines:
            yield f"{name}: no machines"
            continue
        alike = machines_alike(one)
        gpus = ", ".join(f"{n} {kind} GPUs".replace("  ", " ") for kind, n in alike[0].gpus.items())
        limit = duration(one.max_time) if one.max_time else "none"
        yield (
            f"{name}: {counted(len(one.machines), 'machine')},"
            f" most with {gpus or 'no GPU'} and {alike[0].cpus} CPUs; time limit: {limit}"
        )


def _request(answers: SlurmAnswers, alike: Sequence[SlurmMachine]) -> Iterator[str]:
    partition, first = answers.partition, alike[0]
    yield f"partition: {literal(partition.name)}"
    if partition.allowed_accounts:
        yield f"account: {literal(partition.allowed_accounts[0])}"
    yield f"time: {duration(min(DAY, partition.max_time or DAY))}"
    if len(partition.gpu_types) > 1 and len(first.gpus) == 1:
        ((kind, _),) = first.gpus.items()
        yield f"gpu_type: {literal(kind)}"
    if gpus := first.count():
        yield f"cpus: {max(1, first.cpus // gpus)}"
    if answers.login is not None:
        yield f"login: {literal(answers.login)}"


def _devices(alike: Sequence[SlurmMachine]) -> Iterator[str]:
    gpus = alike[0].gpus
    if not alike[0].count():
        yield "  gpus: 0"
        yield "  slots: 1  # processes on each machine"
        return
    yield f"  gpus: {alike[0].count()}  # on each machine"
    for kind in gpus if len(gpus) == 1 else ():
        if kind and (known := in_table(kind)):
            yield f"  gpu: {known}  # for `dtrain plan`; Slurm says {kind}"


def _workdir(answers: SlurmAnswers) -> Iterator[str]:
    if answers.login is None:
        yield f"  workdir: {literal(answers.folder)}  # a folder that all machines share"
    else:
        yield "  workdir: ~  # CHANGE: the folder of the script, which all machines share"
