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
            endpoint = address_and_port(member.address, str(member.port))
            cluster.setdefault(member.role, []).append(endpoint)
    return json.dumps({"cluster": cluster, "task": {"type": task.role, "index": task.index}})


def direct_connections(addresses: Sequence[str]) -> dict[str, str]:
    """Have gRPC reach every task at ``addresses`` directly.

    A proxy in a host's environment would swallow the cluster's own traffic and hang it silently.
    """
    return {"no_grpc_proxy": ",".join(dict.fromkeys(addresses))}
