"""A host's part of the launch plan: command line, interpreter, working folder and GPUs of its
processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from dtrain.environ import devices
from dtrain.launchplan.environment import host_variables
from dtrain.launchplan.plan import HostPlan, Process
from dtrain.spec.model import ClusterFile, Host, Job

CODE = "/dtrain/code"
"""Folder in a pod that ``job.sync`` fills."""


def host_plan(
    spec: ClusterFile,
    node_rank: int,
    environment: Mapping[str, str],
    processes: Sequence[Process],
    ports: Sequence[int],
    python: str,
    *,
    route_to: str | None = None,
) -> HostPlan:
    """A host's part of the launch plan. ``environment`` is that of all its processes, ``python`` as
    of `python_on`, and ``route_to`` as of `host_variables`."""
    host = spec.cluster.hosts[node_rank]
    return HostPlan(
        host=host,
        node_rank=node_rank,
        environment=environment,
        processes=tuple(
            _bound(spec, process, local_rank, environment)
            for local_rank, process in enumerate(processes)
        ),
        workdir=_workdir_on(spec, host),
        ports=tuple(ports),
        node_variables=host_variables(spec.job, environment, route_to, python),
        python=python,
    )


def _bound(
    spec: ClusterFile, process: Process, local_rank: int, environment: Mapping[str, str]
) -> Process:
    """The process, with the GPUs whose NUMA node it is bound to. ``environment`` is the host's."""
    job = spec.job
    # Slurm and docker's daemon start the processes themselves.
    by_daemon = job.container is not None and job.container.engine == "docker"
    if job.binding == "none" or spec.cluster.allocated or by_daemon:
        return process
    own = {**environment, **process.environment}
    # A process that is one rank uses one GPU. torchrun and a TensorFlow task use all they see.
    one_gpu = process.rank is not None and job.per == "gpu"
    gpus = devices.chosen_gpus(own, local_rank if one_gpu else None)
    return replace(process, bound_to_gpus=gpus)


def program_of(job: Job, python: str) -> tuple[str, ...]:
    """The command line of the job's processes, with placeholders."""
    if job.command:
        return (*job.command, *job.args)
    if job.module is not None:
        return (python, "-m", job.module, *job.args)
    script = job.script or ""
    if script.startswith("-"):  # Python would read it as an option
        script = f"./{script}"
    return ("bash" if script.endswith(".sh") else python, script, *job.args)


def python_on(host: Host, local_python: str) -> str:
    """The interpreter of a host's processes."""
    if host.transport == "local" and host.python == "python3":
        return local_python or host.python
    return host.python


def _workdir_on(spec: ClusterFile, host: Host) -> str:
    """The working folder of a host's processes, as in `HostPlan`."""
    workdir = spec.job.workdir
    if spec.cluster.kubernetes is not None:
        return workdir or (CODE if spec.job.sync is not None else ".")
    if workdir is None:
        if spec.job.sync is not None:
            return f"~/dtrain/{spec.name}"
        return "." if host.transport == "local" else "~"
    if host.transport == "local" or workdir.startswith(("/", "~")):
        return workdir
    return f"~/{workdir}"
