"""The relay's connection to the supervisor of its run."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time

from dtrain.node.agent.control import call_supervisor, lives
from dtrain.node.agent.processes import exit_of, reap
from dtrain.node.agent.pulse import Pulse
from dtrain.node.agent.worker_files import decode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dtrain.node.agent.wire import Json

MAX_MESSAGE = 1 << 20
"""Bytes of one message of the supervisor."""
ENDED_WELL = "status 0"
UNSEEN = "its end was not seen"


class SupervisorConnection:
    """The socket to the supervisor, and the supervisor's process if it is our child."""

    def __init__(self) -> None:
        self.pid = 0
        """The supervisor's process id while it is our child, else 0."""
        self.end = UNSEEN
        """How the supervisor ended."""
        self.subreaper = False
        """Whether this process adopts its orphaned descendants."""
        self.pulse = Pulse()
        self._sock: socket.socket | None = None
        self._partial = b""
        self._waiting_for: Json | None = None  # record of a supervisor that accepts no connection
        self._unsent: list[bytes] = []
        self._connecting = threading.Lock()

    def open(self, sock: socket.socket | None) -> None:
        """Use ``sock`` from now on, or no connection."""
        self._sock = sock

    @property
    def absent(self) -> bool:
        """Whether there is no supervisor, not even one to wait for."""
        return self._sock is None and self._waiting_for is None

    def wait_for(self, record: Json) -> None:
        """Connect later to a running supervisor that accepts no connection now."""
        self._waiting_for = record

    def retry(self, pause: float) -> None:
        """Try again to connect after `wait_for`. A stopped supervisor accepts no connection once
        its queue is full, but it may be continued."""
        record = self._waiting_for
        if record is None:
            return
        sock = call_supervisor(record)
        with self._connecting:
            if sock is not None:
                self._sock = sock
                with contextlib.suppress(OSError):  # it has ended: `read` says so
                    sock.sendall(b"".join(self._unsent))
            if sock is not None or not lives(record):
                self._waiting_for = None
                return
        time.sleep(pause)

    def read(self, timeout: float) -> list[Json] | None:
        """The supervisor's messages within ``timeout`` seconds; None once it has closed the
        connection."""
        if self._sock is None:
            return None if self.absent else []
        poll = select.poll()  # `select.select` takes no descriptor above 1023
        poll.register(self._sock, select.POLLIN)
        if not poll.poll(timeout * 1000):
            return []
        try:
            data = self._sock.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            return None
        *lines, self._partial = (self._partial + data).split(b"\n")
        self._partial = self._partial[:MAX_MESSAGE]
        messages = [message for message in map(decode, lines) if message and "type" in message]
        if any(message["type"] == "pong" for message in messages):
            self.pulse.answered()
        return [message for message in messages if message["type"] != "pong"]

    def send(self, line: bytes, flags: int = 0) -> None:
        with self._connecting:
            sock = self._sock
            if self._waiting_for is not None and not flags:
                self._unsent.append(line)
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.sendall(line, flags)

    def await_end(self) -> str:
        """Wait for the end of the supervisor if it is our child. Returns how it ended."""
        for _ in range(100):
            if reap(self.child_ended) or self.pid == 0:
                break
            time.sleep(0.01)
        return self.end

    def child_ended(self, pid: int, status: int) -> None:
        if pid == self.pid:
            self.pid = 0
            code, signame = exit_of(status)
            self.end = "killed by " + signame if signame else "status %s" % code
