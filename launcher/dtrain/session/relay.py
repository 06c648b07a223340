"""The launcher's end of a relay connection, and the thread that writes to it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

from dtrain.diagnostics import ConnectError, NodeError
from dtrain.node import protocol
from dtrain.session.liveness import PingLimit, RelayLiveness
from dtrain.transport import node_program
from dtrain.transport.contract import Connection, RemoteProcess

PING_SECONDS = 5.0
FLUSH_SECONDS = 1.0
"""Seconds in which the last commands must be sent before connections are closed."""


_Command = TypeVar("_Command", bound=Mapping[str, object])


class SilentRelayError(ConnectError):
    """The relay does not answer pings."""


class RelayChannel:
    """One relay on a host. One thread reads; any thread may write."""

    def __init__(self, host: str, connection: Connection, process: RemoteProcess) -> None:
        self.pid: int | None = None
        """The relay's process, once it has sent its first message."""
        self._host = host
        self._connection = connection
        self._process = process
        self._decoder = protocol.FrameDecoder()
        self._liveness = RelayLiveness()
        self._lock = threading.Lock()

    def frames(self) -> Iterator[protocol.Message | protocol.Data]:
        """Yields what the relay sends, until its output ends.

        Raises ConnectError if the connection breaks, SilentRelayError if the relay was given up,
        and ProtocolError for output that no relay writes.
        """
        while data := self._read():
            yield from self._decoder.feed(data)

    def _read(self) -> bytes:
        with self._lock:
            self._liveness.wait()
        broken: ConnectError | None = None
        data = b""
        try:
            data = self._process.read()
        except ConnectError as error:
            broken = error
        # A relay is given up only while this thread waits for it, and then for good. Data that
        # arrives at the same moment is ignored, because the connection is being closed.
        with self._lock:
            self._liveness.hear()
            given_up = self._liveness.given_up
        if given_up:
            reason = "the relay does not answer; it may be stopped (SIGSTOP), or the network cut"
            raise SilentRelayError(self._host, "following the job", reason)
        if broken is not None:
            raise broken
        return data

    def send(self, command: Mapping[str, object]) -> None:
        """Write a command. Ignores a broken connection: the reader reconnects."""
        with suppress(ConnectError):
            self._process.write(protocol.encode_command(command))

    def ping(self, patience: int | None) -> None:
        """Send a ping. A relay that has left more than ``patience`` pings unanswered is given up:
        its connection is closed. ``None`` never gives up."""
        if patience is not None and self.pid is None:
            patience = PingLimit.BEFORE_HELLO
        with self._lock:
            given_up = self._liveness.ping(patience)
        if given_up:
            self._connection.close()
        else:
            self.send({"op": "ping"})

    def failure(self, python: str) -> NodeError:
        """Why the relay's output ended. Waits a few seconds for its exit status."""
        return node_program.failure(
            self._host, "running the agent", python, self._process, self._decoder.noise
        )


class CommandWriter(Generic[_Command]):
    """Sends commands, and a ping every few seconds, to a host's current relay."""

    def __init__(self, patience: Callable[[], int | None]) -> None:
        """``patience``: how many pings the relay may leave unanswered now."""
        self.relay: RelayChannel | None = None
        """Where commands go. The reader replaces it when it reconnects."""
        self._patience = patience
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()

    def send(self, command: _Command) -> None:
        self._commands.put(command)

    def finish(self) -> None:
        """End `run` once all commands given to `send` are sent."""
        self._commands.put(None)

    def run(self) -> None:
        while True:
            try:
                command = self._commands.get(timeout=PING_SECONDS)
            except queue.Empty:
                if self.relay is not None:
                    self.relay.ping(self._patience())
                continue
            if command is None:
                return
            if self.relay is not None:
                self.relay.send(command)


class Closable(Protocol):
    def close(self) -> None:
        """Send and observe nothing more."""

    def disconnect(self, timeout: float) -> None:
        """Close the connection, once all commands are sent or ``timeout`` seconds have passed."""


def close_all(links: Iterable[Closable]) -> None:
    """Send the queued commands, then close the links, whatever their state."""
    open_ = list(links)
    for link in open_:
        link.close()
    until = time.monotonic() + FLUSH_SECONDS
    for link in open_:
        link.disconnect(max(0.0, until - time.monotonic()))
