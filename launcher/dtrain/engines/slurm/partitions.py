"""The partitions of a Slurm cluster and their machines, from ``scontrol`` and ``sinfo``. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping

from dtrain.diagnostics import UsageError
from dtrain.engines.slurm.state import FIELD
from dtrain.planning.request import QueueGpus
from dtrain.records import dataclass
from dtrain.spec.model import Slurm

PARTITIONS = ("scontrol", "--all", "--oneliner", "show", "partition")
MACHINES = ("sinfo", "--all", "--noheader", "--Node", "--format=%R|%N|%T|%c|%f|%G")
"""Commands whose output `read` reads, with hidden partitions. One machine is in several
partitions, once in each."""

_GPUS = re.compile(r"gpu:(?:([^:,()]+):)?(\d{1,6})")
_TIME = re.compile(r"(?:(\d{1,9})-)?(\d{1,9})(?::(\d{1,9}))?(?::(\d{1,9}))?")
_UNUSABLE = ("down", "drain", "fail", "maint", "power", "reboot", "unk", "no_resp", "inval")
MAX_MACHINES = 200_000


@dataclass(frozen=True, slots=True)
class SlurmMachine:
    state: str
    """Slurm's word, such as ``idle`` or ``draining*``."""
    cpus: int
    features: tuple[str, ...]
    gpus: Mapping[str, int]
    """Number of GPUs by type; the type is empty if the cluster's configuration names none."""

    @property
    def usable(self) -> bool:
        """Whether jobs start on it, now or after the jobs that it runs."""
        return not self.state.endswith("*") and not self.state.startswith(_UNUSABLE)

    @property
    def free(self) -> bool:
        """Whether a job may start on it now."""
        return self.usable and self.state.startswith(("idle", "mix"))

    def count(self, gpu_type: str | None = None) -> int:
        """The number of its GPUs, of one type or of all."""
        if gpu_type is None:
            return sum(self.gpus.values())
        return sum(count for kind, count in self.gpus.items() if kind.lower() == gpu_type.lower())


@dataclass(frozen=True, slots=True)
class Partition:
    name: str
    default: bool = False
    hidden: bool = False
    state: str = "UP"
    max_time: float | None = None
    """Seconds; None without a limit."""
    max_nodes: int | None = None
    allowed_accounts: tuple[str, ...] = ()
    """Empty: all."""
    denied_accounts: tuple[str, ...] = ()
    machines: tuple[SlurmMachine, ...] = ()

    @property
    def gpu_types(self) -> tuple[str, ...]:
        """Types of its GPUs, most common first; empty for GPUs without a type."""
        counts = Counter[str]()
        for machine in self.machines:
            counts.update(machine.gpus)
        return tuple(kind for kind, _ in counts.most_common())


def chosen(partitions: Iterable[Partition], names: str | None) -> tuple[Partition, ...]:
    """The partitions that `cluster.slurm.partition` names, or the default one."""
    if names is None:
        return tuple(one for one in partitions if one.default)[:1]
    by_name = {one.name: one for one in partitions}
    return tuple(by_name[name] for name in names.split(",") if name in by_name)


def gpus_of(partitions: Iterable[Partition], slurm: Slurm) -> QueueGpus:
    """The GPUs that a job with these keys gets. Raises UsageError if there is no such partition."""
    possible = chosen(partitions, slurm.partition)
    if not possible:
        raise UsageError(
            f"there is no partition {slurm.partition}"
            if slurm.partition
            else "the cluster has no default partition",
            hint="`sinfo` lists the partitions; set cluster.slurm.partition",
        )
    first = possible[0]
    types = [kind for kind in first.gpu_types if kind]
    if slurm.gpu_type is not None:
        types = [kind for kind in types if kind.lower() == slurm.gpu_type.lower()]
        types = types or [slurm.gpu_type]
    most = max((machine.count(slurm.gpu_type) for machine in first.machines), default=0)
    return QueueGpus(f"partition {first.name}", "slurm.gpu_type", tuple(types), most)


def read(partitions: str, machines: str) -> tuple[Partition, ...]:
    """The partitions in the controller's order. Ignores lines that the commands do not print, such
    as the messages of a site."""
    members: dict[str, list[SlurmMachine]] = {}
    for line in machines.splitlines()[:MAX_MACHINES]:
        name, *fields = line.strip().split("|")
        if len(fields) == 5 and (machine := _machine(*fields)):
            members.setdefault(name, []).append(machine)
    found = []
    for line in partitions.splitlines():
        values: dict[str, str] = dict(FIELD.findall(line))
        if name := values.get("PartitionName", ""):
            found.append(_partition(name, values, members.get(name, ())))
    return tuple(found)


def _partition(name: str, values: Mapping[str, str], machines: Iterable[SlurmMachine]) -> Partition:
    most = values.get("MaxNodes", "")
    return Partition(
        name,
        values.get("Default") == "YES",
        values.get("Hidden") == "YES",
        values.get("State", "UP"),
        seconds(values.get("MaxTime", "")),
        int(most) if re.fullmatch(r"\d{1,9}", most) else None,
        _accounts(values.get("AllowAccounts", "ALL")),
        _accounts(values.get("DenyAccounts", "")),
        tuple(machines),
    )


def _accounts(text: str) -> tuple[str, ...]:
    return () if text in ("ALL", "(null)") else tuple(filter(None, text.split(",")))


def _machine(name: str, state: str, cpus: str, features: str, gres: str) -> SlurmMachine | None:
    if not (name and cpus.isdecimal()):
        return None
    gpus: dict[str, int] = {}
    for kind, count in _GPUS.findall(gres):
        gpus[kind] = gpus.get(kind, 0) + int(count)
    known = () if features == "(null)" else tuple(features.split(","))
    return SlurmMachine(state, int(cpus[:9]), known, gpus)


def seconds(text: str) -> float | None:
    """Slurm's ``2-00:00:00``, ``1:00:00`` or ``30`` (minutes) in seconds; None for UNLIMITED."""
    found = _TIME.fullmatch(text)
    if found is None:
        return None
    days, first, second, third = (int(part) if part else None for part in found.groups())
    if days is not None:
        return float(days * 86400 + (first or 0) * 3600 + (second or 0) * 60 + (third or 0))
    if third is not None:
        return float((first or 0) * 3600 + (second or 0) * 60 + third)
    return float((first or 0) * 60 + (second or 0))
