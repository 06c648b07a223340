"""Where `dtrain exec` runs a command. Pure."""

from __future__ import annotations

import sys
from dataclasses import replace

from dtrain.launchplan.build import build
from dtrain.runs.record import Record
from dtrain.runs.request import Request
from dtrain.session.relays.commands import Target


def targets(request: Request, record: Record | None) -> list[Target]:
    """The hosts of a run, or of a cluster file, each with its own connection."""
    spec = request.spec() if record is None else record.spec()
    plan = build(spec, local_python=sys.executable) if record is None else record.plan
    found = [Target(part.host.name, part.host, plan.agent_python(part)) for part in plan.hosts]
    for host in spec.cluster.spares:
        part = replace(plan.hosts[0], host=host, python=host.python)
        found.append(Target(host.name, host, plan.agent_python(part), spare=True))
    return found
