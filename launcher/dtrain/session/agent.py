"""Starting the node agent on a host that has been reached."""

from __future__ import annotations

from importlib import resources
from typing import Any

from dtrain import protocol
from dtrain.launchplan import HostPlan, LaunchPlan
from dtrain.node.boot import boot_command
from dtrain.transport.contract import Connection, RemoteProcess


def interpreter(plan: LaunchPlan, part: HostPlan) -> str:
    """The interpreter that runs the agent: the workers', unless setup has yet to find it."""
    python = part.processes[0].argv[0] if part.processes else part.host.python
    return "python3" if plan.job.setup and "/" not in python else python


def start(connection: Connection, python: str, run: str, command: dict[str, Any]) -> RemoteProcess:
    """An agent with its first command. Raises ConnectError."""
    process = connection.start(boot_command(python, run))
    source = resources.files("dtrain.node").joinpath("agent.py").read_bytes()
    process.write(b"%d\n%b%b" % (len(source), source, protocol.encode_command(command)))
    return process
