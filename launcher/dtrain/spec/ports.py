"""The TCP ports of a job: their type in the file, and how many a launch needs."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from dtrain.spec.model import ClusterFile
from dtrain.spec.problems import Problems
from dtrain.spec.scalars import Type
from dtrain.spec.schema import Section
from dtrain.spec.source import Node, Scalar
from dtrain.spec.tasks import tasks_listen, tensorflow_tasks

MAX_PORT = 65535
MIN_DRAWN = 1024
"""The first port that needs no privileges."""


class PortRange(Type[tuple[int, int]]):
    """Two ports joined by a hyphen."""

    expects = f"a range of ports from {MIN_DRAWN} to {MAX_PORT}, such as 29500-30523"

    def read(self, node: Node, problems: Problems, name: str) -> tuple[int, int] | None:
        text = node.text if isinstance(node, Scalar) else ""
        if not re.fullmatch(r"[0-9]{1,5}-[0-9]{1,5}", text):
            return self.refuse(node, problems, name)
        first, last = map(int, text.split("-"))
        if not MIN_DRAWN <= first <= last <= MAX_PORT:
            return self.refuse(node, problems, name)
        return first, last

    def json_schema(self) -> dict[str, Any]:
        return {"type": "string", "pattern": "^[0-9]{1,5}-[0-9]{1,5}$"}


def ports_needed(spec: ClusterFile) -> int:
    """How many consecutive ports a launch uses: one for the ranks' rendezvous, or one for each task
    on the machine with the most tasks."""
    if spec.job.ranked or not tasks_listen(spec.job):
        return 1
    # Hosts with the same address are one machine and share its ports.
    addresses = (spec.cluster.hosts[on].address for _, _, on in tensorflow_tasks(spec))
    return max(Counter(addresses).values())


def check_ports(spec: ClusterFile, rendezvous: Section, problems: Problems) -> None:
    """Report a range, or a first port, with too few ports for the tasks of one machine."""
    needed = ports_needed(spec)
    port, (first, last) = spec.job.rendezvous.port, spec.job.rendezvous.ports
    if port is not None and port + needed - 1 > MAX_PORT:
        problems.add(
            f"port {port} is too high: one machine runs {needed} tasks, and the last one would "
            f"listen on port {port + needed - 1}",
            rendezvous.place("port"),
            f"set it to {MAX_PORT - needed + 1} or below",
        )
    elif port is None and last - first + 1 < needed:
        problems.add(
            f"the range has {last - first + 1} ports, but one machine runs {needed} tasks, and "
            "each needs a port",
            rendezvous.place("ports"),
            f"use a range of at least {needed} ports",
        )
