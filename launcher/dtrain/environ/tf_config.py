"""TensorFlow: ``TF_CONFIG`` for worker, chief, ps and evaluator tasks in any mix."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from dtrain.environ.torchrun import address_and_port


@dataclass(frozen=True, slots=True)
class Task:
    """One TensorFlow task and where its server listens."""

    role: str
    index: int
    address: str
    port: int


def tf_config(tasks: Sequence[Task], task: Task) -> str:
    """The value of ``TF_CONFIG`` for ``task``.

    ``cluster`` is the same for every task and leaves evaluators out: they are no part of the
    training cluster.
    """
    cluster: dict[str, list[str]] = {}
    for member in tasks:
        if member.role != "evaluator":
            endpoint = address_and_port(member.address, member.port)
            cluster.setdefault(member.role, []).append(endpoint)
    return json.dumps({"cluster": cluster, "task": {"type": task.role, "index": task.index}})


def task_environment(tasks: Sequence[Task], task: Task) -> dict[str, str]:
    """``TF_CONFIG``, and direct gRPC between tasks.

    A proxy in the environment would swallow the cluster's own traffic and hang it silently.
    """
    peers = sorted({member.address for member in tasks})
    return {"TF_CONFIG": tf_config(tasks, task), "no_grpc_proxy": ",".join(peers)}
