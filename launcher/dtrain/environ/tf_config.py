"""TensorFlow: ``TF_CONFIG`` for worker, chief, ps and evaluator tasks in any mix."""

from __future__ import annotations

from collections.abc import Sequence

from dtrain.environ.template import joined, number
from dtrain.environ.torchrun import address_and_port
from dtrain.records import dataclass


@dataclass(frozen=True, slots=True)
class TensorFlowTask:
    """One TensorFlow task and the address of its server."""

    role: str
    index: int
    address: str
    port: str


def tf_cluster(tasks: Sequence[TensorFlowTask]) -> str:
    """The ``cluster`` of ``TF_CONFIG`` as JSON: the same for every task. It omits evaluators, which
    are not part of the training cluster."""
    cluster: dict[str, list[str]] = {}
    for member in tasks:
        if member.role != "evaluator":
            endpoint = address_and_port(member.address, member.port)
            cluster.setdefault(member.role, []).append(joined("", ('"', endpoint, '"')))
    # Neither roles nor addresses have characters that JSON escapes.
    roles = (
        joined("", (f'"{role}": [', joined(", ", endpoints), "]"))
        for role, endpoints in cluster.items()
    )
    return joined("", ("{", joined(", ", roles), "}"))


def tf_config(cluster: str, task: TensorFlowTask, *, scripted: bool) -> str:
    """The value of ``TF_CONFIG`` for ``task`` in a ``cluster`` from `tf_cluster`."""
    role = number("role", task.role, scripted=scripted)
    index = number("index", task.index, scripted=scripted)
    parts = ('{"cluster": ', cluster, ', "task": {"type": "', role, '", "index": ', index, "}}")
    return joined("", parts)


def direct_connections(addresses: Sequence[str]) -> dict[str, str]:
    """Make gRPC connect to every task at ``addresses`` without a proxy.

    A proxy in a host's environment would intercept the cluster's traffic, and the job would hang.
    """
    return {"no_grpc_proxy": joined(",", dict.fromkeys(addresses))}
