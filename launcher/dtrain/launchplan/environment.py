"""The whole environment of a launch's processes, composed here and nowhere else.

Of two settings of one variable the later in this list wins: what dtrain chooses by itself
(threads, GPUs, interfaces), ``job.env``, the host's own ``env``. What tells one process from
another (``RANK``, ``MASTER_ADDR``, ``TF_CONFIG``) a cluster file may not set at all.

Some values depend on the node: its run folder, the interface that leads to another host, what its
own environment says. These are `NodeVariable`: the node agent completes them, and so does the
shell that runs a dry run's script.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from dtrain.environ import devices
from dtrain.environ.template import Slot, Template
from dtrain.runtime.layout import Layout, Training
from dtrain.spec.model import ClusterFile, Host, Job
from dtrain.spec.placeholders import PER_PROCESS, fill, names_in

RECORDED_CALLS = "2000"
"""Collectives that torch's flight recorder keeps."""
_RECORD_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
"""torch 2.13 warns if the older name is set."""
_RECORD_FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


@dataclass(frozen=True, slots=True)
class NodeVariable:
    """A variable whose value is complete only on the node."""

    value: str
    """Text, or what ``kind`` says."""
    kind: Literal["text", "folder", "file", "pipe", "interface"] = "text"
    """``folder``: a path, relative to the working folder or ``~``. ``file``: a path in the run's
    folder. ``pipe``: the same, and the variable is left out where
    no named pipe can be made. ``interface``: the address of another host; the variable is the
    network interface that leads there, and left out where none can be told."""
    place: Literal["set", "default", "front"] = "set"
    """``default``: only where the node sets neither the variable nor one of ``instead``, whose
    value it takes. ``front``: ahead of the variable's own value, with a colon between them."""
    instead: tuple[str, ...] = ()
    """Older names of the variable."""


@dataclass(frozen=True, slots=True)
class Launched:
    """What only a launch decides; in a dry run, values that it could have."""

    run: str
    port: str
    attempt: str
    restarts: str

    @classmethod
    def of(cls, spec: ClusterFile, run: str | None, port: int | None, attempt: int) -> Launched:
        rendezvous = spec.job.rendezvous
        run, number = run or spec.name, str(port or rendezvous.first_port)
        count = f"${{DTRAIN_ATTEMPT:-{attempt}}}"
        return cls(
            run=Template(Slot(run, f"${{DTRAIN_RUN_ID:-{run}}}")),
            port=number
            if rendezvous.port is not None
            else Template(Slot(number, f"${{MASTER_PORT:-{number}}}")),
            attempt=Template(Slot(str(attempt), count)),
            restarts=Template(Slot(str(attempt - 1), f"$(({count} - 1))")),
        )


def placeholders(
    spec: ClusterFile, launched: Launched, node_rank: int, size: int
) -> dict[str, str]:
    """The values of placeholders that all processes of a host share; ``size`` is the world's."""
    hosts = spec.cluster.hosts
    return {
        "node_rank": str(node_rank),
        "world_size": str(size),
        "nodes": str(len(hosts)),
        "gpus": str(hosts[node_rank].workers),
        "total_gpus": str(sum(host.workers for host in hosts)),
        "master_addr": hosts[0].address,
        "master_port": launched.port,
        "host": hosts[node_rank].name,
        "run": launched.run,
        "attempt": launched.attempt,
    }


def host_environment(
    spec: ClusterFile,
    host: Host,
    launched: Launched,
    identity: Mapping[str, str],
    values: Mapping[str, str],
) -> dict[str, str]:
    """What all processes of a host share; ``identity`` is what their framework wants, ``values``
    those of placeholders."""
    job = spec.job
    environment = devices.network_interface(host.interface)
    if job.framework == "torch" or (job.ranked and host.gpus):
        # A TensorFlow host may share its GPUs between tasks, so there each task names its own.
        environment |= devices.visible_devices(host.gpus)
    environment |= _described("DTRAIN_STRATEGY", job.strategy)
    environment |= _described("DTRAIN_LAYOUT", job.layout)
    environment |= _described("DTRAIN_TRAINING", job.training)
    if job.watchdog.silence is not None:
        # The agent asks a silent worker for its stack with SIGABRT.
        environment["PYTHONFAULTHANDLER"] = "1"
    own = {
        "DTRAIN_RUN_ID": launched.run,
        "DTRAIN_HOST": host.name,
        "DTRAIN_ATTEMPT": launched.attempt,
    }
    chosen = {
        name: fill(value, values)
        for name, value in _chosen(job, host).items()
        if not names_in(value) & {*PER_PROCESS}
    }
    environment = {**environment, **identity, **chosen, **own}
    if gloo := environment.get("GLOO_SOCKET_IFNAME"):
        environment.setdefault("TP_SOCKET_IFNAME", gloo)
    return environment


def process_environment(job: Job, host: Host, values: Mapping[str, str]) -> dict[str, str]:
    """What the cluster file sets to another value for each process of a host."""
    return {
        name: fill(value, values)
        for name, value in _chosen(job, host).items()
        if names_in(value) & {*PER_PROCESS}
    }


def _chosen(job: Job, host: Host) -> dict[str, str]:
    return {**job.env, **host.env}


def host_variables(
    job: Job, environment: Mapping[str, str], route_to: str | None, python: str = ""
) -> dict[str, NodeVariable]:
    """What the node adds for all processes of a host that have this ``environment``, and run
    with ``python`` or with programs that lie beside it."""
    variables = {
        "DTRAIN_RUN_DIR": NodeVariable("", "file"),
        "PYTHONPATH": NodeVariable("runtime.zip", "file", "front"),
        "PYTHONUNBUFFERED": NodeVariable("1", place="default"),
    }
    if route_to is not None:
        gloo, rpc = "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"
        variables[gloo] = NodeVariable(route_to, "interface", "default")
        variables[rpc] = NodeVariable(route_to, "interface", "default", (gloo,))
    if "/" in python:
        folder = python.rpartition("/")[0] or "/"
        variables["PATH"] = NodeVariable(folder, "folder", "front")
    if job.framework == "torch" and job.watchdog.silence is not None:
        variables |= _flight_recorder(environment)
    return {
        name: variable
        for name, variable in variables.items()
        if variable.place != "default" or name not in environment
    }


def process_variables(role: str, index: int) -> dict[str, NodeVariable]:
    """What the node adds for one process."""
    name = f"{role}-{index}"
    variables = {"TORCHELASTIC_ERROR_FILE": NodeVariable(f"{name}.error.json", "file")}
    if role == "torchrun":
        variables["PET_LOG_DIR"] = NodeVariable(f"{name}.ranks", "file")
    return variables


def _flight_recorder(environment: Mapping[str, str]) -> dict[str, NodeVariable]:
    """torch's flight recorder keeps the last collectives, and writes where the agent looks."""
    variables = {
        "TORCH_NCCL_DUMP_ON_TIMEOUT": NodeVariable("1", place="default"),
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": NodeVariable("nccl-ask-", "pipe", "default"),
    }
    new, *old = _RECORD_SIZES
    if not environment.keys() & {new, *old}:
        variables[new] = NodeVariable(RECORDED_CALLS, place="default", instead=tuple(old))
    if not environment.keys() & {*_RECORD_FILES}:
        for name in _RECORD_FILES:
            others = tuple(other for other in _RECORD_FILES if other != name)
            variables[name] = NodeVariable("nccl-trace-", "file", "default", others)
    return variables


def _described(variable: str, value: str | Layout | Training | None) -> dict[str, str]:
    """What the file says about the model, for a script that wants to know."""
    if value is None:
        return {}
    return {variable: value if isinstance(value, str) else json.dumps(asdict(value))}
