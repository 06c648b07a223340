"""Starting the node agent on a host that has been reached."""

from __future__ import annotations

from typing import Any

from dtrain.node import protocol
from dtrain.node.boot import boot_command
from dtrain.node.programs import program
from dtrain.transport.contract import Connection, RemoteProcess


def start(connection: Connection, python: str, run: str, command: dict[str, Any]) -> RemoteProcess:
    """An agent with its first command. Raises ConnectError."""
    process = connection.start(boot_command(python, run))
    agent = program("agent")
    process.write(b"%d\n%b%b" % (len(agent), agent, protocol.encode_command(command)))
    return process
