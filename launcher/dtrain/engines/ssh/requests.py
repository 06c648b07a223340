"""The first command to an agent, which sets its task.

`dtrain.node.agent.commands` documents the fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dtrain.environ.template import NodeSlot, Slot, Template
from dtrain.launchplan.environment import NodeVariable
from dtrain.launchplan.plan import HostPlan, LaunchPlan
from dtrain.node.agent.commands import AttachRequest, LaunchRequest, LookRequest, RunRequest
from dtrain.node.agent.wire import VERSION
from dtrain.node.programs import bundled, bundled_before
from dtrain.records import shallow

READ_SECONDS = 0.001
"""Seconds for each host between two reads of output. Each read costs the launcher about 0.3 ms,
however much it brings."""


def pack(*, checked: bool) -> None:
    """Pack what every host of a launch gets, which may take 0.1 s. Called while the hosts connect,
    or the first one that is ready would wait for it."""
    if checked:
        bundled_before("launch")
    else:
        bundled("agent")


def launch_request(
    plan: LaunchPlan,
    part: HostPlan,
    *,
    workdir: str,
    secrets: Mapping[str, str],
) -> LaunchRequest:
    """Prepare the host's part of the job."""
    job = plan.job
    return {
        **_request(plan, part),
        "op": "launch",
        "workdir": workdir,
        "script": plan.script_on_host,
        "code": plan.code_folder if part.node_rank == 0 else None,
        "python": None if job.container else part.python,
        "setup": list(job.setup),
        "environment": dict(part.environment),
        "node_variables": _written(part.node_variables),
        "secrets": dict(secrets),
        "world_size": plan.world_size,
        "processes": [
            {
                "role": process.role,
                "index": process.index,
                "rank": process.rank,
                "ranks": process.ranks,
                "container": [_parts(word) for word in process.container],
                "argv": list(process.argv),
                "environment": dict(process.environment),
                "node_variables": _written(process.node_variables),
                "bound_to_gpus": list(process.bound_to_gpus),
            }
            for process in part.processes
        ],
        "ports": list(part.ports),
        "job_ports": sorted({port for each in plan.hosts for port in each.ports}),
        "grace": job.grace,
        "on_disconnect": job.on_disconnect,
        "lease": job.lease,
    }


def attach_request(
    plan: LaunchPlan,
    part: HostPlan,
    *,
    offsets: Mapping[str, int],
    outputs: bool,
    previous: int | None,
) -> AttachRequest:
    """Follow a running job from ``offsets``. Without ``outputs``, only its events.
    ``previous`` is the process ID of the relay to replace."""
    return {
        **_request(plan, part),
        "op": "attach",
        "offsets": dict(offsets),
        "outputs": outputs,
        "previous": previous,
    }


def status_request(plan: LaunchPlan, part: HostPlan) -> LookRequest:
    """Report the state of a job that was launched before."""
    return {**_request(plan, part), "op": "look"}


def _request(plan: LaunchPlan, part: HostPlan) -> RunRequest:
    return {
        "protocol": VERSION,
        "run": plan.run,
        "host": part.host.name,
        "run_dir": plan.run_dir,
        "trust_group": plan.trust_group,
        "containers": None if part.enclosure is None else shallow(part.enclosure),
        "interval": len(plan.hosts) * READ_SECONDS,
    }


def _parts(word: str) -> list[str | dict[str, str]]:
    """A word for the node, which fills in what only it knows."""
    parts = word.parts if isinstance(word, Template) else (word,)
    return [
        {"node": part.key}
        if isinstance(part, NodeSlot)
        else (part.value if isinstance(part, Slot) else part)
        for part in parts
    ]


def _written(variables: Mapping[str, NodeVariable]) -> dict[str, dict[str, Any]]:
    return {name: shallow(variable) for name, variable in variables.items()}
