"""The launch plan as one JSON object, the same on every machine. Secrets are masked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dtrain.launchplan import LaunchPlan

SCHEMA = 1
MASK = "***"


def document(plan: LaunchPlan) -> dict[str, Any]:
    """``schema``, ``name`` and ``hosts``; each host with its ``processes``."""
    return {
        "schema": SCHEMA,
        "name": plan.name,
        "hosts": [
            {
                "host": part.host.name,
                "address": part.host.address,
                "node_rank": part.node_rank,
                "workdir": part.workdir,
                "setup": list(plan.job.setup),
                "route_to": part.route_to,
                "environment": masked(part.environment, plan),
                "processes": [
                    {
                        "role": process.role,
                        "index": process.index,
                        "argv": list(process.argv),
                        "environment": dict(process.environment),
                    }
                    for process in part.processes
                ],
            }
            for part in plan.hosts
        ],
    }


def masked(environment: Mapping[str, str], plan: LaunchPlan) -> dict[str, str]:
    """``environment`` with the job's secrets in it, each behind a mask."""
    return {**environment, **dict.fromkeys(plan.job.secrets, MASK)}
