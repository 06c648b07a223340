"""The launch plan: which processes run on which host, with which environment.

A plan is the request that a launch executes and a dry run shows; both come from `build`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dtrain.spec.model import Host, Job


@dataclass(frozen=True, slots=True)
class Process:
    """One process that dtrain starts on a host."""

    role: str
    """``worker``, ``chief``, ``ps``, ``evaluator``, or ``torchrun`` for torchrun itself."""
    index: int
    """Among the processes of that role in the whole job; a torch worker's is its global rank."""
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    """What differs from process to process; over the host's environment."""
    rank: int | None = None
    """Global rank, where this process is one rank."""
    service: bool = False
    """Runs until the others are done, and is then stopped (parameter servers)."""

    @property
    def label(self) -> str:
        """Short name for a log prefix: the rank, or role and index."""
        return str(self.rank) if self.rank is not None else f"{self.role}{self.index}"


@dataclass(frozen=True, slots=True)
class HostPlan:
    host: Host
    node_rank: int
    environment: Mapping[str, str]
    """Shared by all processes of the host."""
    processes: tuple[Process, ...]
    ports: tuple[int, ...] = ()
    """TCP ports that the host's processes will listen on."""


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    name: str
    hosts: tuple[HostPlan, ...]
    job: Job
    workdir: str
    """Where processes start: absolute, ``~``-relative, or (on this machine) relative to the
    cluster file."""
    run_dir: str
