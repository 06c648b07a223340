"""TensorFlow's tasks: the host of each task, and whether tasks listen on ports."""

from __future__ import annotations

from dtrain.environ.placement import place_tasks
from dtrain.spec.model import ClusterFile, Job
from dtrain.spec.strategies import STRATEGIES


def tensorflow_tasks(spec: ClusterFile) -> list[tuple[str, int, int]]:
    """``(role, index, host)`` of every task; without ``job.roles``, workers on every host.

    A TPU slice has one task, on the first host: the other hosts run only the TPU runtime.
    """
    hosts = spec.cluster.hosts
    if spec.job.strategy == "tpu":
        return [("worker", 0, 0)]
    if spec.job.roles:
        return place_tasks(spec.job.roles, [len(host.gpus) for host in hosts])
    on = [n for n, host in enumerate(hosts) for _ in range(1 if host.gpus else host.slots)]
    return [("worker", index, host) for index, host in enumerate(on)]


def tasks_listen(job: Job) -> bool:
    """Whether TensorFlow's tasks reach each other at the ports in ``TF_CONFIG``."""
    if job.strategy is None:
        return True
    return job.strategy != "tpu" and not STRATEGIES["tensorflow"][job.strategy].single_host
