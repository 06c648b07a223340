"""What the machines of a job are: for checks and for plans."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from dtrain.checks import Evidence
from dtrain.diagnostics import UsageError
from dtrain.planning.request import QueueGpus
from dtrain.runs.request import Request
from dtrain.session.facts.gather_order import THOROUGH, Depth
from dtrain.spec.model import ClusterFile, Slurm
from dtrain.transport.questions import Ask, never
from dtrain.transport.select import Transports


def examine(
    request: Request,
    *,
    rendezvous: bool = False,
    bandwidth: bool = False,
    compute: bool = False,
    depth: Depth = THOROUGH,
    ask: Ask | None = None,
    on_notice: Callable[[str], None] = lambda text: None,
    stopped: Callable[[], bool] = never,
) -> Evidence:
    """The facts that `dtrain.api.check` judges. With ``compute``, ``bandwidth`` also measures the
    speed of the devices. If an engine chooses the hosts, ``depth`` does not apply.

    Raises UsageError for a test that the job does not have, and KeyboardInterrupt soon after
    ``stopped`` returns true.
    """
    spec = request.spec()
    if spec.cluster.allocated and (rendezvous or bandwidth):
        raise UsageError(
            "`rendezvous` and `bandwidth` need hosts by name, but an engine chooses them",
            hint="leave the option out, or check a copy of the file with cluster.hosts",
        )
    if spec.cluster.kubernetes is not None:
        from dtrain.engines.kubernetes import inspection as kubernetes

        return kubernetes.examine(request, stopped)
    with closing(Transports(request.base, ask, on_notice)) as transport:
        if spec.cluster.slurm is not None:
            from dtrain.engines.slurm import allocation
            from dtrain.engines.slurm import inspection as slurm

            request = replace(request, allocation=allocation.current(spec, os.environ))
            return slurm.examine(request, transport, stopped)

        from dtrain.engines.ssh.ports import draw_ports
        from dtrain.launchplan.build import build
        from dtrain.session.facts.host_connections import HostConnections
        from dtrain.session.facts.preflight import Preflight, refuse_impossible

        refuse_impossible(spec.job, rendezvous=rendezvous, bandwidth=bandwidth)
        if rendezvous or bandwidth:
            # The rehearsal starts each rank directly, whatever the rendezvous backend of the job.
            direct = replace(spec.job.rendezvous, backend="direct")
            spec = replace(spec, job=replace(spec.job, rendezvous=direct))
        plan = build(spec, port=draw_ports(spec)[0], local_python=sys.executable)
        with (
            closing(HostConnections(transport)) as connections,
            closing(
                Preflight(plan, connections, base=request.base, stopped=stopped, notice=on_notice)
            ) as preflight,
        ):
            transport.prepare(spec.cluster.hosts)
            evidence = preflight.look(depth)
            if rendezvous:
                evidence = preflight.rehearse(evidence)
            if bandwidth:
                evidence = preflight.measure(evidence, compute=compute)
            return evidence


def queue_gpus(spec: ClusterFile, file: Path | None, ask: Ask | None) -> QueueGpus:
    """The GPUs of the machines that a job of the file may get. Raises DtrainError."""
    if spec.cluster.kubernetes is not None:
        from dtrain.engines.kubernetes.machines import gpus

        return gpus(spec.cluster.kubernetes)
    from dtrain.engines.slurm import login_shell
    from dtrain.engines.slurm.partitions import gpus_of

    slurm = spec.cluster.slurm or Slurm()
    folder = file.absolute().parent if file else Path.cwd()
    with closing(Transports(folder, ask)) as transport:
        return gpus_of(login_shell.partitions(transport, slurm), slurm)
