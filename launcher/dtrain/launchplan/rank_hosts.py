"""The hosts of a torch or JAX job: their processes are ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dtrain.environ import jax, ranks, torchrun
from dtrain.environ.template import Slot, Template
from dtrain.launchplan.environment import (
    Launched,
    host_environment,
    placeholders,
    process_environment,
    process_variables,
)
from dtrain.launchplan.plan import HostPlan, Process
from dtrain.launchplan.programs import host_plan, program_of, python_on
from dtrain.spec.model import ClusterFile, Job
from dtrain.spec.placeholders import fill_all


def rank_hosts(spec: ClusterFile, launched: Launched, local_python: str) -> Iterator[HostPlan]:
    """The hosts of a torch or JAX job. ``local_python``: see `build`."""
    job, hosts = spec.job, spec.cluster.hosts
    world = ranks.World(
        launched.run,
        tuple(1 if job.per == "host" else host.workers for host in hosts),
        master_address=hosts[0].address,
        master_port=launched.port,
        restarts=launched.restarts,
        scripted=launched.scripted,
    )
    for node_rank, values in enumerate(placeholders(spec, launched, world.size)):
        host = hosts[node_rank]
        python = python_on(host, local_python)
        if job.framework == "torch" and job.rendezvous.backend != "direct":
            identity = torchrun.threads(world.ranks_by_node[node_rank])
            if job.rendezvous.backend == "static":  # c10d numbers the nodes itself
                identity |= ranks.nodes(world, node_rank)
            processes = [_torchrun(spec, world, node_rank, python, values)]
        else:
            identity = _identity(job, world, node_rank)
            processes = [
                _rank(spec, world, node_rank, local_rank, python, values)
                for local_rank in range(world.ranks_by_node[node_rank])
            ]
        environment = host_environment(spec, host, launched, identity, values)
        route_to = None
        # The host name of a pod resolves to the address of the pod, so Gloo finds the interface.
        torch = job.framework == "torch" and spec.cluster.kubernetes is None
        if torch and len(hosts) > 1 and "GLOO_SOCKET_IFNAME" not in environment:
            route_to = hosts[0 if node_rank else 1].address
            if world.scripted:
                other = "${dtrain_addresses[dtrain_node_rank == 0]}"
                route_to = Template(Slot(route_to, other))
        ports = [int(launched.port)] if node_rank == 0 else []
        yield host_plan(spec, node_rank, environment, processes, ports, python, route_to=route_to)


def _identity(job: Job, world: ranks.World, node_rank: int) -> dict[str, str]:
    """Variables that are the same for all ranks of a node."""
    if job.framework == "torch":
        return torchrun.node_environment(world, node_rank)
    shared = ranks.node_environment(world, node_rank)
    return shared | jax.node_environment(world) if job.framework == "jax" else shared


def _rank(
    spec: ClusterFile,
    world: ranks.World,
    node_rank: int,
    local_rank: int,
    python: str,
    values: Mapping[str, str],
) -> Process:
    job, host = spec.job, spec.cluster.hosts[node_rank]
    rank = world.first_rank(node_rank) + local_rank
    environment = ranks.rank_environment(world, node_rank, local_rank)
    if job.framework == "torch":
        environment = torchrun.rank_environment(world, node_rank, local_rank)
    elif job.framework == "jax":
        devices_of_host = len(host.gpus) if job.per == "host" else None
        environment |= jax.rank_environment(world, node_rank, local_rank, devices_of_host)
    values = {
        **values,
        "rank": world.rank(node_rank, local_rank),
        "local_rank": world.local_rank(local_rank),
    }
    return Process(
        role="worker",
        index=rank,
        rank=rank,
        argv=fill_all(program_of(job, python), values),
        environment=environment | process_environment(job, host, values),
        service=job.serves(node_rank),
        node_variables=process_variables("worker", rank, scripted=world.scripted),
    )


def _torchrun(
    spec: ClusterFile, world: ranks.World, node_rank: int, python: str, values: Mapping[str, str]
) -> Process:
    job, host = spec.job, spec.cluster.hosts[node_rank]
    backend = job.rendezvous.backend
    assert backend != "direct"  # noqa: S101 (types)
    address = host.address
    if world.scripted:
        address = Template(Slot(address, "${dtrain_addresses[dtrain_node_rank]}"))
    options = torchrun.torchrun_arguments(world, node_rank, address, backend)
    program = program_of(job, python)
    program = program[1:] if program[0] == python else ("--no-python", *program)
    return Process(
        role="torchrun",
        index=node_rank,
        ranks=world.ranks_by_node[node_rank],
        argv=(python, "-m", "torch.distributed.run", *options, *fill_all(program, values)),
        environment=_torchrun_logs(spec),
        service=job.serves(node_rank),
        node_variables=process_variables("torchrun", node_rank, scripted=world.scripted),
    )


def _torchrun_logs(spec: ClusterFile) -> Mapping[str, str]:
    if spec.cluster.kubernetes is not None:
        return {}  # A pod has one log: torchrun's own output, with that of its ranks.
    return torchrun.LOGS_OF_RANKS if spec.cluster.slurm is not None else torchrun.LOGS
