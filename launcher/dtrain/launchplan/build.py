"""Builds the launch plan of a cluster file.

Pure: the same file gives the same plan on every machine at any time.
"""

from __future__ import annotations

from dataclasses import replace

from dtrain.environ.template import Slot, Template
from dtrain.launchplan import container
from dtrain.launchplan.environment import Launched
from dtrain.launchplan.plan import HostPlan, LaunchPlan
from dtrain.launchplan.pods import object_name, pod_address, pod_names
from dtrain.launchplan.rank_hosts import rank_hosts
from dtrain.launchplan.task_hosts import task_hosts
from dtrain.spec.model import ClusterFile, Container, Job


def build(
    spec: ClusterFile,
    *,
    run: str = "",
    port: int | None = None,
    attempt: int = 1,
    local_python: str = "",
) -> LaunchPlan:
    """The launch plan of a cluster file.

    A launch passes the attempt's unique name as ``run``, its ``port``, its number, and the
    interpreter to use for ``python3`` on this machine.
    """
    launched = Launched.of(spec, run, port, attempt)
    if spec.cluster.allocated:
        spec = _to_allocate(spec, run)
    if spec.job.container is not None:  # the image has its own interpreter
        local_python = ""
    if spec.job.framework == "tensorflow":
        hosts = task_hosts(spec, launched, local_python)
    else:
        hosts = rank_hosts(spec, launched, local_python)
    if spec.job.container is not None:
        hosts = (_in_containers(spec.job, spec.job.container, part) for part in hosts)
    cluster = spec.cluster
    plan = LaunchPlan(
        spec.name,
        tuple(hosts),
        spec.job,
        run_dir=cluster.run_dir,
        trust_group=cluster.trust_group,
        run=run,
        slurm=cluster.slurm,
        kubernetes=cluster.kubernetes,
        attempt=attempt,
    )
    return plan if cluster.kubernetes is None else plan.on(pod_names(len(plan.hosts)))


def _to_allocate(spec: ClusterFile, run: str) -> ClusterFile:
    """``spec`` with shell expansions in place of the hosts' names and addresses: ``dtrain_hosts``
    and ``dtrain_addresses`` are arrays in node-rank order. A process uses the name of its own host
    only, and the address of any."""
    hosts = []
    for node_rank, host in enumerate(spec.cluster.hosts):
        address = host.address
        if spec.cluster.kubernetes is not None:
            address = pod_address(object_name(spec.name, run), node_rank)
        hosts.append(
            replace(
                host,
                name=Template(Slot(host.name, "${dtrain_hosts[dtrain_node_rank]}")),
                address=Template(Slot(address, f"${{dtrain_addresses[{node_rank}]}}")),
            )
        )
    return replace(spec, cluster=replace(spec.cluster, hosts=tuple(hosts)))


def _in_containers(job: Job, image: Container, part: HostPlan) -> HostPlan:
    """``part`` with each of its processes in a container."""
    # The image has a PATH of its own.
    shared = {name: value for name, value in part.node_variables.items() if name != "PATH"}
    workers = [
        container.ContainerProcess(
            name=Template("dtrain-", part.environment["DTRAIN_RUN_ID"], f"-{process.name}"),
            environment={**part.environment, **process.environment},
            others=(*shared, *process.node_variables, *job.secrets, "USER", "LOGNAME"),
            gpus=bool(part.host.gpus),
        )
        for process in part.processes
    ]
    return replace(
        part,
        processes=tuple(
            replace(process, container=container.command(image, worker))
            for process, worker in zip(part.processes, workers, strict=True)
        ),
        node_variables=shared,
        enclosure=container.enclosure(image, workers),
    )
