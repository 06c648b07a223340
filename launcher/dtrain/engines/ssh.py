"""The SSH engine: `dtrain.session.controller`, one connection to each host."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace

from dtrain.launchplan.plan import build
from dtrain.runs.record import Record, Request
from dtrain.session.commands import Target
from dtrain.session.controller import Session
from dtrain.session.inquiry import ask
from dtrain.session.status import HostStatus


class SshEngine(Session):
    def status(self, record: Record, known: Mapping[str, HostStatus]) -> Mapping[str, HostStatus]:
        return ask(record, known, self._transport)


def targets(request: Request, record: Record | None) -> list[Target]:
    """The hosts of a run, or of a cluster file, each with its own connection."""
    spec = request.spec() if record is None else record.spec()
    plan = build(spec, local_python=sys.executable) if record is None else record.plan()
    found = [Target(part.host.name, part.host, plan.agent_python(part)) for part in plan.hosts]
    for host in spec.cluster.spares:
        part = replace(plan.hosts[0], host=host, python=host.python)
        found.append(Target(host.name, host, plan.agent_python(part), spare=True))
    return found
