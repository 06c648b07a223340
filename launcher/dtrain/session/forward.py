"""A port of a host, made reachable on this machine through the host's connection."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from dtrain.diagnostics import ConnectError
from dtrain.transport.contract import Connection, TcpStream

OPEN_WITHIN = 10.0
"""Seconds that the host has to connect to its own port."""
_PIECE = 1 << 16


class Forward:
    """Listens on 127.0.0.1 and passes each connection on to ``port`` of a host.

    ``connection`` gives the host's connection of the moment, which a reconnect replaces.
    """

    def __init__(self, port: int, connection: Callable[[], Connection | None]) -> None:
        """Raises OSError where this machine has no port left."""
        self._remote_port = port
        self._connection = connection
        self._lock = threading.Lock()
        self._closed = False
        self._open: set[TcpStream] = set()
        self._listener = _listen(port)
        self.port: int = self._listener.getsockname()[1]
        """The same number as on the host, where it is free here."""
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            streams = list(self._open)
        # Closing alone would not wake the thread that waits in accept(2).
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for stream in streams:
            _close(stream)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

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
        if not closed:
            back = threading.Thread(target=_pump, args=(host, client), daemon=True)
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
    """Pass on what comes, and then the end of it."""
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
