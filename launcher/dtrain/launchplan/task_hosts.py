"""The hosts of a TensorFlow job: their processes are tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping

from dtrain.environ import devices, tf_config, tpu
from dtrain.environ.placement import is_service, trains
from dtrain.environ.template import number
from dtrain.launchplan.environment import (
    Launched,
    chosen_variables,
    host_environment,
    placeholders,
    process_environment,
    process_variables,
)
from dtrain.launchplan.plan import HostPlan, Process
from dtrain.launchplan.programs import host_plan, program_of, python_on
from dtrain.spec.model import ClusterFile, Host
from dtrain.spec.placeholders import fill_all
from dtrain.spec.tasks import tasks_listen, tensorflow_tasks


def task_hosts(spec: ClusterFile, launched: Launched, local_python: str) -> Iterator[HostPlan]:
    """The hosts of a TensorFlow job. ``local_python``: see `build`."""
    job, hosts = spec.job, spec.cluster.hosts
    placed, scripted = tensorflow_tasks(spec), launched.scripted
    listening: Counter[str] = Counter()
    tasks: list[tf_config.TensorFlowTask] = []
    ranks_of: list[list[int]] = [[] for _ in hosts]
    for rank, (role, index, on) in enumerate(placed):
        # Hosts with the same address are one machine and share its ports.
        address = hosts[on].address
        tasks.append(
            tf_config.TensorFlowTask(role, index, address, launched.later_port(listening[address]))
        )
        listening[address] += 1
        ranks_of[on].append(rank)
    shared, own = _tensorflow_identity(spec, tasks)
    for node_rank, values in enumerate(placeholders(spec, launched, len(tasks))):
        host = hosts[node_rank]
        mine = [tasks[rank] for rank in ranks_of[node_rank]]
        gpus = _gpus_by_task(mine, job.roles, host)
        chosen = chosen_variables(job, host)
        python = python_on(host, local_python)
        numbered = {
            tasks[rank]: {
                **values,
                "rank": number("rank", rank, scripted=scripted),
                "local_rank": number("local_rank", local_rank, scripted=scripted),
            }
            for local_rank, rank in enumerate(ranks_of[node_rank])
        }
        processes = [
            Process(
                role=task.role,
                index=task.index,
                argv=fill_all(program_of(job, python), numbered[task]),
                environment=_unless(chosen, devices.visible_devices(gpus[task], scripted=scripted))
                | own(task)
                | process_environment(job, host, numbered[task]),
                service=is_service(task.role, job.roles),
                node_variables=process_variables(task.role, task.index, scripted=scripted),
            )
            for task in mine
        ]
        environment = host_environment(spec, host, launched, shared, values)
        ports = [int(task.port) for task in mine] if tasks_listen(job) else []
        yield host_plan(spec, node_rank, environment, processes, ports, python)


def _tensorflow_identity(
    spec: ClusterFile, tasks: list[tf_config.TensorFlowTask]
) -> tuple[dict[str, str], Callable[[tf_config.TensorFlowTask], dict[str, str]]]:
    """The variables by which tasks find each other: those that all tasks share, and a function that
    returns those of one task."""
    if spec.job.strategy == "tpu":
        addresses = [host.address for host in spec.cluster.hosts]
        if len(addresses) == 1:
            return {}, lambda _task: {}
        shared = tf_config.direct_connections(addresses) | tpu.coordinator_environment(addresses)
        return shared, lambda _task: {}
    if not tasks_listen(spec.job):
        return {}, lambda _task: {}
    cluster, scripted = tf_config.tf_cluster(tasks), spec.cluster.allocated
    return (
        tf_config.direct_connections([task.address for task in tasks]),
        lambda task: {"TF_CONFIG": tf_config.tf_config(cluster, task, scripted=scripted)},
    )


def _gpus_by_task(
    tasks: list[tf_config.TensorFlowTask], roles: Mapping[str, int], host: Host
) -> dict[tf_config.TensorFlowTask, tuple[int, ...]]:
    """The GPUs of a host, divided among its tasks that train. An evaluator gets them only if no
    task trains there."""
    wanting = [task for task in tasks if trains(task.role, roles)]
    wanting = wanting or [task for task in tasks if task.role == "evaluator"]
    shares = devices.split(host.gpus, len(wanting)) if wanting else []
    return dict.fromkeys(tasks, ()) | dict(zip(wanting, shares, strict=True))


def _unless(chosen: Collection[str], environment: Mapping[str, str]) -> dict[str, str]:
    """``environment`` without the variables that the cluster file has chosen."""
    return {name: value for name, value in environment.items() if name not in chosen}
