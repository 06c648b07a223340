"""The supervisor's sockets: it accepts relays, reads their commands and answers them."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket

from dtrain.node.agent.control import peer_of
from dtrain.node.agent.wire import encode
from dtrain.node.agent.worker_files import decode
from dtrain.node.listening import accept

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

    from dtrain.node.agent.commands import Command
    from dtrain.node.agent.wire import Json

MAX_COMMAND = 1 << 20
"""Bytes of one command."""


class ControlServer:
    """Waits for relays, their commands and signals."""

    def __init__(
        self,
        relay: socket.socket,
        on_command: Callable[[Command, socket.socket], None],
        on_abandoned: Callable[[], None],
        on_signal: Callable[[], object],
    ) -> None:
        """``relay`` is the one that launches the run. ``on_abandoned`` is called when the last
        relay has closed its connection."""
        self._on_command, self._on_abandoned = on_command, on_abandoned
        self._on_signal = on_signal
        self._clients: dict[int, tuple[socket.socket, bytearray]] = {}
        self._listener: socket.socket | None = None
        self._poll = select.poll()
        # Python writes a byte to the waker for each signal.
        self._wake, self._waker = socket.socketpair()
        for sock in (self._wake, self._waker):
            sock.setblocking(False)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        self._poll.register(self._wake, select.POLLIN)
        self._add(relay)

    def listen(self, name: bytes) -> None:
        """Accept relays on the abstract socket ``name``. Raises OSError."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(name)
        listener.listen(16)
        listener.setblocking(False)
        self._listener = listener
        self._poll.register(listener, select.POLLIN)

    def wait(self, timeout: float | None) -> None:
        """Handle everything that arrives; block for at most ``timeout`` seconds, if given."""
        ready = [fd for fd, _ in self._poll.poll(None if timeout is None else timeout * 1000)]
        # The listener first: a relay that takes over connects, and then ends the one before it.
        for fd in sorted(ready, key=self._clients.__contains__):
            if fd == self._wake.fileno():
                with contextlib.suppress(BlockingIOError):
                    self._wake.recv(4096)
                self._on_signal()
            elif self._listener is not None and fd == self._listener.fileno():
                self._accept(self._listener)
            elif fd in self._clients:
                self._read(fd)

    def broadcast(self, message: Json) -> None:
        for client, _ in self._clients.values():
            self.send(client, message)

    def send(self, client: socket.socket, message: Json) -> None:
        with contextlib.suppress(OSError):
            client.send(encode(message) + b"\n")

    def _accept(self, listener: socket.socket) -> None:
        client = None
        with contextlib.suppress(OSError):
            client = accept(listener)
        if client is None:
            return
        if peer_of(client)[1] == os.geteuid():
            self._add(client)
        else:
            client.close()

    def _add(self, client: socket.socket) -> None:
        client.setblocking(False)
        self._clients[client.fileno()] = client, bytearray()
        self._poll.register(client, select.POLLIN)

    def _read(self, fd: int) -> None:
        client, pending = self._clients[fd]
        try:
            data = client.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._poll.unregister(fd)
            del self._clients[fd]
            client.close()
            if not self._clients:
                self._on_abandoned()
            return
        pending += data
        *lines, rest = pending.split(b"\n")
        pending[:] = rest[:MAX_COMMAND]
        for line in lines:
            command: Any = decode(bytes(line))
            if command is not None:
                self._on_command(command, client)
