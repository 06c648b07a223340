"""The launcher's end of a relay connection."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeVar

from dtrain.diagnostics import ConnectError, NodeError
from dtrain.messages.decode import ProtocolError
from dtrain.node import protocol
from dtrain.session.relays.liveness import PingLimit, RelayLiveness
from dtrain.transport import node_program
from dtrain.transport.contract import Connection, RemoteProcess
from dtrain.transport.threads import Heartbeat, blocking

PING_SECONDS = 5.0
FLUSH_SECONDS = 1.0
"""Seconds in which the last commands must be sent before connections are closed."""


_Command = TypeVar("_Command", bound=Mapping[str, object])
heartbeat = Heartbeat(blocking, lambda: PING_SECONDS)


class SilentRelayError(ConnectError):
    """The relay does not answer pings."""


class RelayChannel:
    """One relay on a host. One thread reads; any thread may write."""

    def __init__(
        self,
        host: str,
        connection: Connection,
        process: RemoteProcess,
        python: str,
        attempted: str = "running the agent",
    ) -> None:
        """``process`` runs a program of dtrain under ``python``. ``attempted``: what fails if it
        ends."""
        self.pid: int | None = None
        """The relay's process, once it has sent its first message."""
        self._host = host
        self._connection = connection
        self._process = process
        self._python, self._attempted = python, attempted
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

    def messages(self) -> Iterator[dict[str, Any]]:
        """As `frames`, of a relay that no output was requested from."""
        while data := self._read():
            yield from self.messages_in(data)

    def messages_in(self, data: bytes) -> Iterator[dict[str, Any]]:
        """Those that ``data`` of `hear` completes. Raises ProtocolError."""
        for frame in self._decoder.feed(data):
            if isinstance(frame, protocol.Data):
                raise ProtocolError("unrequested output of a worker")
            yield frame.body

    def follow(
        self,
        take: Callable[[protocol.Message | protocol.Data], bool],
        end: Callable[[Exception | None], None],
    ) -> None:
        """Pass what the relay sends to ``take``, in the connection's thread, until its output ends,
        or until ``take`` returns False or raises. Then call ``end``, which must not wait, with what
        `frames` or ``take`` has raised, or None."""

        def receive(data: bytes | ConnectError) -> bool:
            more, problem = False, None
            try:
                chunk = self.hear(data)
                more = bool(chunk) and all(map(take, self._decoder.feed(chunk)))
            except Exception as error:  # noqa: BLE001 (`end` handles all of them)
                problem = error
            if more:
                self.wait()
            else:
                end(problem)
            return more

        self.wait()
        self._process.follow(receive)

    def _read(self) -> bytes:
        self.wait()
        data: bytes | ConnectError
        try:
            data = self._process.read()
        except ConnectError as error:
            data = error
        return self.hear(data)

    def wait(self) -> None:
        """The caller begins to wait for the relay: pings without an answer count."""
        with self._lock:
            self._liveness.wait()

    def hear(self, data: bytes | ConnectError) -> bytes:
        """The caller waits no longer: the process has sent ``data``, or its connection is lost.
        Raises as `frames`."""
        # A relay is given up only while this thread waits for it, and then for good. Data that
        # arrives at the same moment is ignored, because the connection is being closed.
        with self._lock:
            self._liveness.hear()
            given_up = self._liveness.given_up
        if given_up:
            reason = "the relay does not answer; it may be stopped (SIGSTOP), or the network cut"
            raise SilentRelayError(self._host, "following the job", reason)
        if isinstance(data, ConnectError):
            raise data
        return data

    @property
    def has_begun(self) -> bool:
        """Whether the relay has written anything. It does so before it reads its first command."""
        return self._decoder.synced

    @property
    def quiet(self) -> bool:
        """Whether nothing arrives although the connection is open: the network may be cut."""
        with self._lock:
            return self._liveness.quiet

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

    def failure(self) -> NodeError:
        """Why the relay's output ended. Waits a few seconds for its exit status."""
        noise = self._decoder.noise
        return node_program.failure(self._host, self._attempted, self._python, self._process, noise)


class CommandWriter(Generic[_Command]):
    """Sends commands, and a ping every few seconds, to a host's current relay.

    All hosts share a few threads. A connection that blocks keeps one of them, and delays only the
    commands of its own host.
    """

    def __init__(
        self, patience: Callable[[], int | None], report: Callable[[Exception], None]
    ) -> None:
        """``patience``: how many pings the relay may leave unanswered now. ``report`` is called
        with an exception that only a bug raises; later commands are sent all the same."""
        self.relay: RelayChannel | None = None
        """Where commands go, if anywhere. The reader replaces it when it reconnects."""
        self._patience = patience
        self._report = report
        # Reentrant, because a signal handler of the program that uses dtrain may request a stop.
        self._lock = threading.RLock()
        self._commands: deque[_Command] = deque()
        self._ping = False
        """Whether a ping is due."""
        self._started = self._finished = self._busy = False
        self._idle = threading.Event()
        """Set once `finish` was called and all commands are sent, and before `start`."""
        self._idle.set()

    @property
    def quiet(self) -> bool:
        """Whether there is a relay and it does not answer now."""
        relay = self.relay
        return relay is not None and relay.quiet

    def start(self) -> None:
        """Begin to send. Commands wait until then."""
        with self._lock:
            self._started = True
            self._idle.clear()
            if not self._finished:
                heartbeat.start(self.ping)
        self._work()

    def send(self, command: _Command) -> None:
        with self._lock:
            if not self._finished:
                self._commands.append(command)
        self._work()

    def ping(self) -> None:
        with self._lock:
            self._ping = True
        self._work()

    def finish(self) -> None:
        """Send nothing beyond the commands given to `send` before."""
        with self._lock:
            self._finished = True
        heartbeat.stop(self.ping)
        self._work()

    def join(self, timeout: float) -> None:
        """Wait until a writer that has finished has sent all commands, or ``timeout`` seconds."""
        self._idle.wait(timeout)

    def _work(self) -> None:
        with self._lock:
            if not self._started:
                return
            busy, self._busy = self._busy, True
        if busy:
            blocking.catch_up()  # this machine may have had no free thread before
        else:
            blocking.run(self._send_all)

    def _send_all(self) -> None:
        while True:
            with self._lock:
                command = self._commands.popleft() if self._commands else None
                ping, self._ping = self._ping and not self._finished, False
                if command is None and not ping:
                    self._busy = False
                    if self._finished:
                        self._idle.set()
                    return
            relay = self.relay  # once: another thread may replace it, or take it away
            try:
                if relay is not None and command is not None:
                    relay.send(command)
                if relay is not None and ping:
                    relay.ping(self._patience())
            except Exception as bug:  # noqa: BLE001 (`report` ends the run)
                self._report(bug)


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
