"""Starts the node agent over a connection to a host."""

from __future__ import annotations

from dtrain.node import protocol
from dtrain.node.agent.commands import FirstCommand
from dtrain.transport import node_program
from dtrain.transport.contract import Connection, RemoteProcess


def start(
    connection: Connection,
    python: str,
    run: str,
    request: FirstCommand,
    started: RemoteProcess | None = None,
) -> RemoteProcess:
    """Start an agent, unless the check has ``started`` one, and send its first command. Raises
    ConnectError."""
    name = "agent" if request["op"] == "launch" else "relay"
    process = started or node_program.start(connection, name, python, label=run)
    process.write(protocol.encode_command(request))
    return process
