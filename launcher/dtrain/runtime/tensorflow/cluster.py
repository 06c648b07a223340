"""The TensorFlow cluster of this process, read from ``TF_CONFIG``."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field

_PROXIES = ("grpc_proxy", "http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")


@dataclass(frozen=True, slots=True)
class TfConfig:
    """The tasks of a job, and the task of this process. Without tasks, this process is alone."""

    tasks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """``HOST:PORT`` of every task, by role. Evaluators may be missing: no task connects to them."""
    role: str = "worker"
    index: int = 0

    @property
    def name(self) -> str:
        """Such as ``worker 1``."""
        return f"{self.role} {self.index}"

    @property
    def has_parameter_servers(self) -> bool:
        return bool(self.tasks.get("ps"))

    @property
    def is_chief(self) -> bool:
        """Whether this task represents the job: the chief, or worker 0 if there is no chief."""
        if "chief" in self.tasks:
            return self.role == "chief"
        return self.role == "worker" and self.index == 0 and not self.has_parameter_servers

    @property
    def peers(self) -> dict[str, str]:
        """``HOST:PORT`` of every other task, by name."""
        return {
            f"{role} {index}": address
            for role, addresses in self.tasks.items()
            for index, address in enumerate(addresses)
            if (role, index) != (self.role, self.index)
        }


def current_cluster(environment: Mapping[str, str] = os.environ) -> TfConfig:
    """The cluster in ``TF_CONFIG``, or a cluster of this process alone.

    Raises ValueError if TensorFlow could not read ``TF_CONFIG``, or if it lacks this task.
    """
    text = environment.get("TF_CONFIG")
    if not text:
        return TfConfig()
    try:
        config = json.loads(text)
        tasks = {role: tuple(ends) for role, ends in config.get("cluster", {}).items() if ends}
        task = config.get("task", {})
        role, index = str(task.get("type", "worker")), int(task.get("index", 0))
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"TF_CONFIG is not a cluster and a task in JSON: {error}") from None
    # TensorFlow allows an evaluator outside the cluster.
    if tasks and role != "evaluator" and index >= len(tasks.get(role, ())):
        raise ValueError(f"TF_CONFIG says this is {role} {index}, but its cluster has no such task")
    return TfConfig(tasks, role, index)


def connect_directly(cluster: TfConfig, environment: MutableMapping[str, str] = os.environ) -> None:
    """Keep the cluster's traffic off a proxy, which would drop it and hang every task.

    gRPC prefers ``no_grpc_proxy`` to ``no_proxy``, so it is extended if it is set.
    """
    if not any(environment.get(name) for name in _PROXIES):
        return
    hosts = [address.rpartition(":")[0].strip("[]") for address in cluster.peers.values()]
    variable = "no_grpc_proxy" if environment.get("no_grpc_proxy") else "no_proxy"
    known = [host for host in environment.get(variable, "").split(",") if host]
    environment[variable] = ",".join(dict.fromkeys([*known, *hosts]))
