"""Connections to all hosts of a plan, for what is no launch: a check, a question."""

from __future__ import annotations

import threading

from dtrain.launchplan.plan import HostPlan
from dtrain.transport.contract import Connection, Transport


class HostConnections:
    """Opens a connection to each host, as ``reach`` of a `Preflight`, and closes all of them."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._lock = threading.Lock()
        self._open: list[Connection] = []
        self._closed = False

    def __call__(self, part: HostPlan) -> Connection:
        connection = self._transport.connect(part.host)
        with self._lock:
            self._open.append(connection)
            closed = self._closed
        if closed:  # it took too long, and nobody waits any more
            connection.close()
        return connection

    def close(self) -> None:
        """Close the connections, also those that a thread still opens or uses."""
        with self._lock:
            self._closed = True
            connections = list(self._open)
        for connection in connections:
            connection.close()
