"""Starting the node agent on a host that has been reached."""

from __future__ import annotations

from importlib import resources
from typing import Any

from dtrain import protocol
from dtrain.node.boot import boot_command
from dtrain.transport.contract import Connection, RemoteProcess


def start(connection: Connection, python: str, run: str, command: dict[str, Any]) -> RemoteProcess:
    """An agent with its first command. Raises ConnectError."""
    process = connection.start(boot_command(python, run))
    source = resources.files("dtrain.node").joinpath("agent.py").read_bytes()
    process.write(b"%d\n%b%b" % (len(source), source, protocol.encode_command(command)))
    return process
