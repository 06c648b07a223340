"""Starts the node agent over a connection to a host."""

from __future__ import annotations

from typing import Any

from dtrain.node import protocol
from dtrain.transport import node_program
from dtrain.transport.contract import Connection, RemoteProcess


def start(connection: Connection, python: str, run: str, command: dict[str, Any]) -> RemoteProcess:
    """Start an agent and send its first command. Raises ConnectError."""
    name = "agent" if command["op"] == "launch" else "relay"
    process = node_program.start(connection, name, python, label=run)
    process.write(protocol.encode_command(command))
    return process
