"""The launch plan: the processes on each host, with their environment.

A launch executes the plan, and a dry run shows it. `dtrain.launchplan.build` makes it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from itertools import pairwise
from pathlib import PurePath, PurePosixPath

from dtrain.environ.template import Template
from dtrain.launchplan import container, names
from dtrain.launchplan.environment import NodeVariable
from dtrain.records import dataclass
from dtrain.spec.model import Host, Job, Kubernetes, Slurm


@dataclass(frozen=True, slots=True)
class Process:
    """One process that dtrain starts on a host."""

    role: str
    """``worker``, ``chief``, ``ps``, ``evaluator``, or ``torchrun`` for torchrun itself."""
    index: int
    """Index in this role over the whole job; for a torch worker, its global rank."""
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    """Variables of this process. They override the host's environment."""
    rank: int | None = None
    """Global rank, if this process is one rank."""
    ranks: int = 1
    """Number of worker processes that it runs: more than one for torchrun."""
    service: bool = False
    """Runs until the other processes finish, and is then stopped (parameter servers, and with
    ``success_policy: first_host`` all processes of the other hosts)."""
    node_variables: Mapping[str, NodeVariable] = field(default_factory=dict)
    """Variables that the node adds for this process. They override the host's."""
    bound_to_gpus: tuple[int, ...] = ()
    """The node binds the process to the NUMA node of these GPUs, if they share one."""
    container: tuple[str, ...] = ()
    """The words in front of ``argv`` that run it in a container."""

    @property
    def name(self) -> str:
        return names.process_name(self.role, self.index)

    @property
    def label(self) -> str:
        return names.label(self.role, self.index, self.rank)


@dataclass(frozen=True, slots=True)
class HostPlan:
    """One host's part of the launch."""

    host: Host
    node_rank: int
    environment: Mapping[str, str]
    """Shared by all processes of the host."""
    processes: tuple[Process, ...]
    workdir: str
    """Working folder of the processes: absolute, relative to ``~``, or (on this machine) relative
    to the cluster file."""
    ports: tuple[int, ...] = ()
    """TCP ports that the host's processes will listen on."""
    node_variables: Mapping[str, NodeVariable] = field(default_factory=dict)
    """Variables that the node adds to the environment."""
    python: str = "python3"
    """The Python interpreter of its processes."""
    enclosure: container.Enclosure | None = None
    """The containers in which its processes run."""

    def workdir_from(self, base: PurePath) -> str:
        """The working folder on the host. ``base`` is the cluster file's folder."""
        local = self.host.transport == "local" and not self.workdir.startswith("~")
        return str(base / self.workdir) if local else self.workdir

    @property
    def interface_variables(self) -> Mapping[str, NodeVariable]:
        """The node variables that become the name of a network interface."""
        every = self.node_variables.items()
        return {name: variable for name, variable in every if variable.kind == "interface"}


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """A whole launch. ``hosts`` is in node-rank order."""

    name: str
    hosts: tuple[HostPlan, ...]
    job: Job
    run_dir: str
    """Folder on each node that contains the run's folder."""
    trust_group: str | None = None
    """Unix group on each node whose members may own and write to the job's folders."""
    run: str = ""
    """The unique name of the run's attempt, on hosts too; empty in a dry run."""
    slurm: Slurm | None = None
    """Set if Slurm allocates the hosts. Their names and addresses, and the numbers of processes,
    are then shell expansions (see `dtrain.environ.template`)."""
    kubernetes: Kubernetes | None = None
    """Set if the hosts are pods on Kubernetes. Their names are then known, and the environment has
    shell expansions as on Slurm."""

    attempt: int = 1
    world_size: int = field(init=False, compare=False)
    """Worker processes in the whole job."""

    def __post_init__(self) -> None:
        size = sum(process.ranks for host in self.hosts for process in host.processes)
        object.__setattr__(self, "world_size", size)

    @property
    def gpus(self) -> int:
        """GPUs of the whole job: the ranks of a host do not always have one each."""
        return sum(len(part.host.gpus) for part in self.hosts)

    @property
    def devices(self) -> int:
        """The GPUs; without any, the worker processes, which compute on CPUs."""
        return self.gpus or self.world_size

    @property
    def host_names(self) -> tuple[str, ...]:
        return tuple(part.host.name for part in self.hosts)

    @property
    def hosts_known(self) -> bool:
        """Whether the hosts have names: an engine may choose them only when the job starts."""
        return not isinstance(self.hosts[0].host.name, Template)

    def on(self, hosts: Sequence[str]) -> LaunchPlan:
        """The plan on the hosts that an engine chose, in node-rank order."""
        named = zip(self.hosts, hosts, strict=True)
        parts = (replace(part, host=replace(part.host, name=name)) for part, name in named)
        return replace(self, hosts=tuple(parts))

    def agent_python(self, part: HostPlan) -> str:
        """The interpreter for dtrain's agent on a host: the interpreter of the job's processes, or
        ``python3`` if setup lines may change ``PATH`` or the processes run in a container."""
        hidden = self.job.container or (self.job.setup and "/" not in part.python)
        return "python3" if hidden else part.python

    @property
    def script_on_host(self) -> str | None:
        """The script, if the hosts have it: an absolute path may be one inside an image."""
        return self._on_host(self.job.script)

    @property
    def code_folder(self) -> str | None:
        """The folder of the job's code on the hosts, relative to the working folder. None if there
        is none that may belong to a repository."""
        if self.job.sync is not None:
            return None
        folder = str(PurePosixPath(self.script_on_host or ".").parent)
        return folder if folder != "." or self.hosts[0].workdir != "~" else None

    @property
    def shell_script(self) -> str | None:
        """The shell script that the processes run, also as ``command: [bash, run.sh]``, if the
        hosts have it."""
        command, texts = self.job.command, self.shell_texts
        # `bash -c ./run.sh` also runs a script.
        words = [word for word in command if word not in texts or len(word.split()) == 1]
        words = words if command else [self.job.script or ""]
        program = next((word for word in words if word.endswith((".sh", ".py"))), "")
        return self._on_host(program) if program.endswith(".sh") else None

    @property
    def shell_texts(self) -> list[str]:
        """The commands in ``command: [bash, -c, TEXT]``."""
        pairs = pairwise(self.job.command)
        return [text for flag, text in pairs if re.fullmatch("-[A-Za-z]*c", flag)]

    def _on_host(self, file: str | None) -> str | None:
        return None if self.job.container and file and file.startswith("/") else file
