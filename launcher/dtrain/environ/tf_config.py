"""TensorFlow: ``TF_CONFIG`` for worker, chief, ps and evaluator tasks in any mix."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from dtrain.environ.torchrun import address_and_port


@dataclass(frozen=True, slots=True)
class Task:
    """One TensorFlow task and the address of its server."""

    role: str
    index: int
    address: str
    port: int


def tf_config(tasks: Sequence[Task], task: Task) -> str:
    """The value of ``TF_CONFIG`` for ``task``.

    ``cluster`` is the same for every task. It omits evaluators, which are not part of the training
    cluster.
    """
    cluster: dict[str, list[str]] = {}
    for member in tasks:
        if member.role != "evaluator":
            endpoint = address_and_port(member.address, str(member.port))
            cluster.setdefault(member.role, []).append(endpoint)
    return json.dumps({"cluster": cluster, "task": {"type": task.role, "index": task.index}})


def direct_connections(addresses: Sequence[str]) -> dict[str, str]:
    """Make gRPC connect to every task at ``addresses`` without a proxy.

    A proxy in a host's environment would intercept the cluster's traffic, and the job would hang.
    """
    return {"no_grpc_proxy": ",".join(dict.fromkeys(addresses))}
