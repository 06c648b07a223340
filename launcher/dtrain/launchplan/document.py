"""The launch plan as one JSON object, the same on every machine. Secrets are masked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from dtrain.launchplan.environment import NodeVariable
from dtrain.launchplan.plan import HostPlan, LaunchPlan
from dtrain.launchplan.shell import completed

SCHEMA = 1
MASK = "***"


def document(plan: LaunchPlan) -> dict[str, Any]:
    """``schema``, ``name``, the program, and ``hosts``, each with its ``processes``.

    ``strategy_reason`` is empty unless dtrain chose the strategy. ``node_variables`` are more
    environment variables, as shell text, because only the node knows their values.
    A ``service`` runs until the processes that are none are done, and is then stopped.
    A process is bound to the NUMA node of its ``bound_to_gpus``, if they share one.
    Where an engine chooses the hosts, their names and addresses are null. What depends on them has
    example values, and so has what is only known when the job starts.
    """
    job, known = plan.job, plan.hosts_known
    return {
        "schema": SCHEMA,
        "name": plan.name,
        "strategy": job.strategy,
        "strategy_reason": job.strategy_reason,
        "layout": None if job.layout is None else asdict(job.layout),
        "hosts": [
            {
                "host": part.host.name if known else None,
                "address": part.host.address if known else None,
                "node_rank": part.node_rank,
                "workdir": part.workdir,
                "setup": list(plan.job.setup),
                "route_to": _route_to(part) if known else None,
                "environment": masked(part.environment, plan),
                "node_variables": completed_by_node(part.node_variables),
                "processes": [
                    {
                        "role": process.role,
                        "index": process.index,
                        "container": list(process.container),
                        "argv": list(process.argv),
                        "environment": dict(process.environment),
                        "node_variables": completed_by_node(process.node_variables),
                        "bound_to_gpus": list(process.bound_to_gpus),
                        "service": process.service,
                    }
                    for process in part.processes
                ],
            }
            for part in plan.hosts
        ],
    }


def completed_by_node(variables: Mapping[str, NodeVariable]) -> dict[str, str]:
    """Variables whose value only the node knows, as shell text."""
    return {name: completed(name, variable) for name, variable in variables.items()}


def masked(environment: Mapping[str, str], plan: LaunchPlan) -> dict[str, str]:
    """``environment`` plus the job's secrets, with masked values."""
    return {**environment, **dict.fromkeys(plan.job.secrets, MASK)}


def _route_to(part: HostPlan) -> str | None:
    """The address to which the host's interface leads; None if it does not matter."""
    return next((variable.value for variable in part.interface_variables.values()), None)
