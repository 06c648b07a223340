"""Forwards a port of a host to this machine, over the host's connection."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from dtrain.diagnostics import ConnectError
from dtrain.node.listening import accept
from dtrain.transport.contract import Connection, TcpStream

OPEN_WITHIN = 10.0
"""Seconds that the host may take to connect to its own port."""
_PIECE = 1 << 16


class Forward:
    """Listens on 127.0.0.1 and forwards each connection to ``port`` on a host.

    ``connection`` returns the host's current connection, which changes when the link reconnects.
    """

    def __init__(self, port: int, connection: Callable[[], Connection | None]) -> None:
        """Raises OSError if this machine has no free port."""
        self._remote_port = port
        self._connection = connection
        self._lock = threading.Lock()
        self._closed = False
        self._open: set[TcpStream] = set()
        self._listener = _listen(port)
        self.port: int = self._listener.getsockname()[1]
        """The host's port number if it is free on this machine, else another one."""
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            streams = list(self._open)
        # Closing alone does not wake the thread that blocks in accept(2).
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for stream in streams:
            _close(stream)

    def _accept(self) -> None:
        while True:
            try:
                client = accept(self._listener)
            except OSError:
                return
            if client is None:
                continue
            try:
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()
            except RuntimeError:  # this machine has no free thread
                client.close()

    def _serve(self, client: socket.socket) -> None:
        connection = self._connection()
        host: TcpStream | None = None
        with suppress(ConnectError):
            host = connection.dial(self._remote_port, OPEN_WITHIN) if connection else None
        if host is None:
            client.close()
            return
        with self._lock:
            self._open |= {client, host}
            closed = self._closed
        back = threading.Thread(target=_pump, args=(host, client), daemon=True)
        with suppress(RuntimeError):  # this machine has no free thread
            if not closed:
                back.start()
                _pump(client, host)
                back.join()
        with self._lock:
            self._open -= {client, host}
        _close(client)
        _close(host)


def _listen(port: int) -> socket.socket:
    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError:
        return socket.create_server(("127.0.0.1", 0))


def _pump(source: TcpStream, target: TcpStream) -> None:
    """Copy data until ``source`` ends, then end ``target``."""
    with suppress(OSError, EOFError):
        while data := source.recv(_PIECE):
            target.sendall(data)
    with suppress(OSError, EOFError):
        target.shutdown(socket.SHUT_WR)


def _close(stream: TcpStream) -> None:
    with suppress(OSError, EOFError):
        stream.shutdown(socket.SHUT_RDWR)
    with suppress(OSError, EOFError):
        stream.close()
