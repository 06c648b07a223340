"""The complete environment of the processes of a launch. No other module composes it.

A variable may come from dtrain's defaults (threads, GPUs, interfaces), from ``job.env`` and from
the host's ``env``; the later one wins. A cluster file must not set variables that identify a
process (``RANK``, ``MASTER_ADDR``, ``TF_CONFIG``).

Some values depend on the node: the run folder, the interface for another host, the node's own
environment. A `NodeVariable` describes such a value. The node agent completes it, or the shell that
runs the script of a dry run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Literal

from dtrain.environ import devices
from dtrain.environ.template import Slot, Template, joined, number
from dtrain.launchplan.names import process_name
from dtrain.records import dataclass
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
    """A variable that the node completes."""

    value: str
    """Text; its meaning depends on ``kind``."""
    kind: Literal["text", "folder", "file", "pipe", "interface"] = "text"
    """``folder``: a path, relative to the working folder or ``~``. ``file``: a path in the run's
    folder. ``pipe``: also a path in the run's folder; not set if the node cannot create a named
    pipe. ``interface``: the address of another host; the variable becomes the network interface
    for this address, and is not set if there is none."""
    place: Literal["set", "default", "front"] = "set"
    """``default``: used only if the node sets neither the variable nor one of ``instead``; a value
    of ``instead`` is copied. ``front``: put before the node's own value, separated by a colon."""
    instead: tuple[str, ...] = ()
    """Older names of the variable."""


@dataclass(frozen=True, slots=True)
class Launched:
    """Values that are only known at launch; a dry run uses example values."""

    run: str
    port: str
    attempt: str
    restarts: str
    scripted: bool = False
    """Whether one script starts all processes and decides these values."""

    @classmethod
    def of(cls, spec: ClusterFile, run: str, port: int | None, attempt: int) -> Launched:
        rendezvous = spec.job.rendezvous
        if spec.cluster.allocated:
            return cls(
                run=run or number("run", spec.name, scripted=True),
                port=number("port", rendezvous.first_port, scripted=rendezvous.port is None),
                attempt=number("attempt", attempt, scripted=True),
                restarts=Template(Slot(str(attempt - 1), "$((dtrain_attempt - 1))")),
                scripted=True,
            )
        run, first = run or spec.name, str(port or rendezvous.first_port)
        count = f"${{DTRAIN_ATTEMPT:-{attempt}}}"
        return cls(
            run=Template(Slot(run, f"${{DTRAIN_RUN_ID:-{run}}}")),
            port=first
            if rendezvous.port is not None
            else Template(Slot(first, f"${{MASTER_PORT:-{first}}}")),
            attempt=Template(Slot(str(attempt), count)),
            restarts=Template(Slot(str(attempt - 1), f"$(({count} - 1))")),
        )

    def later_port(self, offset: int) -> str:
        """The port ``offset`` after the first."""
        later = str(int(self.port) + offset)
        if self.scripted and offset and isinstance(self.port, Template):
            return Template(Slot(later, f"$((dtrain_port + {offset}))"))
        return self.port if self.scripted and not offset else later


def placeholders(spec: ClusterFile, launched: Launched, size: int) -> Iterator[dict[str, str]]:
    """For each host, the placeholder values that are the same for all its processes; ``size`` is
    the world size."""
    hosts = spec.cluster.hosts
    shared = {
        "world_size": str(size),
        "nodes": str(len(hosts)),
        "total_gpus": str(sum(host.workers for host in hosts)),
        "addresses": joined(",", (host.address for host in hosts)),
        "master_addr": hosts[0].address,
        "master_port": launched.port,
        "run": launched.run,
        "attempt": launched.attempt,
    }
    for node_rank, host in enumerate(hosts):
        yield {
            **shared,
            "node_rank": number("node_rank", node_rank, scripted=launched.scripted),
            "gpus": str(host.workers),
            "host": host.name,
        }


def host_environment(
    spec: ClusterFile,
    host: Host,
    launched: Launched,
    identity: Mapping[str, str],
    values: Mapping[str, str],
) -> dict[str, str]:
    """Variables that are the same for all processes of a host. ``identity`` has the framework's
    variables, ``values`` the placeholders."""
    job = spec.job
    environment = devices.network_interface(host.interface)
    if job.framework == "torch" or (job.ranked and host.gpus):
        # Tasks on a TensorFlow host may share its GPUs, so each task has its own list of GPUs.
        environment |= devices.visible_devices(host.gpus, scripted=launched.scripted)
    environment |= _described("DTRAIN_STRATEGY", job.strategy)
    environment |= _described("DTRAIN_LAYOUT", job.layout)
    environment |= _described("DTRAIN_TRAINING", job.training)
    if job.watchdog.silence is not None:
        # The agent collects the stack of a hanging worker with SIGABRT.
        environment["PYTHONFAULTHANDLER"] = "1"
    own = {
        "DTRAIN_RUN_ID": launched.run,
        "DTRAIN_HOST": host.name,
        "DTRAIN_ATTEMPT": launched.attempt,
    }
    chosen = _filled(job, host, values, per_process=False)
    environment = {**environment, **identity, **chosen, **own}
    if gloo := environment.get("GLOO_SOCKET_IFNAME"):
        environment.setdefault("TP_SOCKET_IFNAME", gloo)
    return environment


def process_environment(job: Job, host: Host, values: Mapping[str, str]) -> dict[str, str]:
    """Variables of the cluster file with placeholders that differ between processes."""
    return _filled(job, host, values, per_process=True)


def _filled(
    job: Job, host: Host, values: Mapping[str, str], *, per_process: bool
) -> dict[str, str]:
    """The variables of the cluster file that differ between the processes of a host, or those that
    do not."""
    return {
        name: fill(value, values)
        for name, value in chosen_variables(job, host).items()
        if per_process is not names_in(value).isdisjoint(PER_PROCESS)
    }


def chosen_variables(job: Job, host: Host) -> dict[str, str]:
    """The variables that the cluster file sets on a host."""
    return {**job.env, **host.env}


def host_variables(
    job: Job, environment: Mapping[str, str], route_to: str | None, python: str = ""
) -> dict[str, NodeVariable]:
    """Variables that the node adds for all processes of a host. ``environment`` is their
    environment so far; ``python`` is their interpreter, whose folder goes on ``PATH``.

    Gloo and torch RPC use the interface for the address ``route_to``. Their default is the address
    of the host's own name, which is a loopback address on Debian.
    """
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


def process_variables(role: str, index: int, *, scripted: bool) -> dict[str, NodeVariable]:
    """Variables that the node adds for one process."""
    name = process_name(role, index)
    if scripted:
        name = Template(Slot(role, "$dtrain_role"), "-", Slot(str(index), "$dtrain_index"))
    variables = {"TORCHELASTIC_ERROR_FILE": NodeVariable(joined("", (name, ".error.json")), "file")}
    if role == "torchrun":
        variables["PET_LOG_DIR"] = NodeVariable(joined("", (name, ".ranks")), "file")
    return variables


def _flight_recorder(environment: Mapping[str, str]) -> dict[str, NodeVariable]:
    """Enable torch's flight recorder of collectives, with output in a path that the agent reads."""
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
    """One variable for the script with a setting of the cluster file; empty for None."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {variable: value}
    # Without unset fields: an older `dtrain.runtime` may not know them.
    return {variable: json.dumps({k: v for k, v in asdict(value).items() if v is not None})}
