"""What an engine says about the machines that it chooses: for checks and for plans."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from dtrain.checks import Evidence
from dtrain.diagnostics import UsageError
from dtrain.engines.slurm import allocation, inspection, login_shell
from dtrain.engines.slurm import queue_gpus as partition_gpus
from dtrain.planning.request import QueueGpus
from dtrain.runs.request import Request
from dtrain.spec.model import ClusterFile, Slurm
from dtrain.transport.questions import Ask
from dtrain.transport.select import Transports


def examine_allocated(
    request: Request,
    *,
    rendezvous: bool,
    ask: Ask | None,
    on_notice: Callable[[str], None] | None,
    stopped: Callable[[], bool],
) -> Evidence:
    """The facts about a job whose hosts an engine chooses. Raises UsageError for ``rendezvous``,
    which needs hosts by name, and KeyboardInterrupt soon after ``stopped`` returns true."""
    if rendezvous:
        raise UsageError(
            "`rendezvous` and `bandwidth` need hosts by name, but an engine chooses them",
            hint="leave the option out, or check a copy of the file with cluster.hosts",
        )
    if request.spec().cluster.kubernetes is not None:
        from dtrain.engines.kubernetes import inspection as kubernetes

        return kubernetes.examine(request, stopped)
    request = replace(request, allocation=allocation.current(request.spec(), os.environ))
    with closing(Transports(request.base, ask, on_notice or (lambda text: None))) as transport:
        return inspection.examine(request, transport, stopped)


def queue_gpus(spec: ClusterFile, file: Path | None, ask: Ask | None) -> QueueGpus:
    """The GPUs that the partition of a cluster file has. Raises DtrainError."""
    slurm = spec.cluster.slurm or Slurm()
    folder = file.absolute().parent if file else Path.cwd()
    with closing(Transports(folder, ask)) as transport:
        return partition_gpus.gpus_of(login_shell.partitions(transport, slurm), slurm)
