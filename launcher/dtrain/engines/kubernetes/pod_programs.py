"""Runs programs in the pods of a run, through the API server (the subresource ``exec``)."""

from __future__ import annotations

import math
import socket
import ssl
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from dtrain.diagnostics import ConnectError, UsageError
from dtrain.engines.kubernetes.client import Client
from dtrain.engines.kubernetes.launched import LaunchedJob, client_of
from dtrain.engines.kubernetes.objects import program_end
from dtrain.engines.kubernetes.routines import InThread, Pause, Readable, Routine, finish
from dtrain.launchplan.pods import REPLICATED_JOB
from dtrain.messages.decode import answer_of, excerpt, parse_object
from dtrain.runs.record import Record
from dtrain.runs.request import Request
from dtrain.session.relays.commands import Target
from dtrain.spec.model import Host
from dtrain.transport.contract import TcpStream
from dtrain.transport.tail import Tail

ATTEMPTED = "running a command"
_STDIN, _STDOUT, _STDERR, _STATUS, _CLOSE = 0, 1, 2, 3, 255
"""Channels of the protocol v5.channel.k8s.io: the first byte of a message."""
_TEXT, _BINARY, _END, _PING = 1, 2, 8, 9
"""Kinds of messages on a WebSocket (RFC 6455, section 5.2)."""
_PIECE = 1 << 15
"""Bytes of one message to a program."""
PING_SECONDS = 5.0
"""Seconds without a byte until a ping is sent, as `kubectl` does: proxies end idle connections."""
PINGS = 12
"""The pings after which a connection without an answer is given up."""
LOCKED_SECONDS = 0.02
"""Seconds until a reader tries again to get a connection that is being written to."""


class PodTransport:
    """Connects to the pods of a run."""

    def __init__(self, request: Request, record: Record | None) -> None:
        """Raises UsageError if no pod runs, and NodeError."""
        keys = request.spec().cluster.kubernetes
        assert keys is not None  # noqa: S101 (types)
        if record is None:
            raise UsageError(
                f"{request.file}: Kubernetes creates the pods when the job starts",
                hint="name a run instead; `dtrain ps` lists the runs",
            )
        self._client = client_of(record, keys)
        self._plan = record.plan
        running = [pod for pod in LaunchedJob(self._client, self._plan).pods() if pod.running]
        if not running:
            raise UsageError(
                f"no pod of run {record.run} is running",
                hint=f"`dtrain ps {record.run}` shows its state",
            )
        # The pod of the last attempt counts, if an earlier one still terminates.
        running.sort(key=lambda pod: (pod.attempt, pod.created))
        self._pods = {pod.index: pod.name for pod in running}

    @property
    def targets(self) -> list[Target]:
        plan = self._plan
        return [Target(part.host.name, part.host, plan.agent_python(part)) for part in plan.hosts]

    def connect(self, host: Host) -> PodConnection:
        pod = self._pods.get(self._plan.host_names.index(host.name))
        if pod is None:
            raise ConnectError(host.name, ATTEMPTED, "its pod does not run")
        return PodConnection(self._client, host.name, pod)

    def close(self) -> None:
        """Each process has a connection of its own."""


class PodConnection:
    def __init__(self, client: Client, host: str, pod: str) -> None:
        self._client = client
        self._host, self._pod = host, pod
        self._processes: list[PodProcess] = []
        self._closed = False

    def start(self, command: str) -> PodProcess:
        argv = ["/bin/sh", "-c", command]
        process = PodProcess(self._host, self._client.start(self._pod, REPLICATED_JOB, argv))
        self._processes.append(process)
        if self._closed:
            process.close()
        return process

    def dial(self, port: int, timeout: float) -> TcpStream:
        raise ConnectError(self._host, f"connecting to its port {port}", "it is in a pod")

    def close(self) -> None:
        self._closed = True
        for process in self._processes:
            process.close()


class PodProcess:
    """See `dtrain.transport.contract.RemoteProcess`."""

    def __init__(self, host: str, web_socket: Any) -> None:
        self._host = host
        self._web_socket = web_socket
        # TLS connections of Python are not for two threads at once. No thread waits for data while
        # it holds the lock: the rest of a message may never arrive.
        self._lock = threading.Lock()
        self._tail = Tail()
        self._over = self._closed = self._unwritable = False
        self._status: int | None = None

    def write(self, data: bytes) -> None:
        for start in range(0, len(data), _PIECE):
            self._send(bytes([_STDIN]) + data[start : start + _PIECE])

    def close_stdin(self) -> None:
        self._send(bytes([_CLOSE, _STDIN]))

    def _send(self, message: bytes, kind: int = _BINARY) -> None:
        import websocket

        with self._lock:
            if self._unwritable:
                return
            try:
                self._web_socket.settimeout(None)
                self._web_socket.send(message, kind)
            except (websocket.WebSocketException, OSError):
                # The program has ended, or the connection is lost: `read` finds out. After a second
                # attempt, TLS would not give it what arrived before.
                self._unwritable = True

    def read(self, size: int = 1 << 18) -> bytes:
        """``size`` is not a limit: a message is at most as long as the API server sends it."""
        return finish(self.reading())

    def reading(self) -> Routine[bytes]:
        """As `read`."""
        while not self._over:
            yield from self._wait()
            # Who writes may have to wait.
            while not self._lock.acquire(blocking=False):
                yield Pause(LOCKED_SECONDS)
            try:
                data = self._take()
            finally:
                self._lock.release()
            if data:
                return data
        return b""

    def _take(self) -> bytes:
        """What the program has written, if the next message is there and has some of it."""
        import websocket

        try:
            self._web_socket.settimeout(0)
            kind, message = self._web_socket.recv_data(control_frame=True)
        except (ssl.SSLWantReadError, BlockingIOError):
            return b""  # the rest of a message is missing
        except (websocket.WebSocketException, OSError, ValueError) as error:
            self._over = True
            if self._status is None and not self._closed:
                raise self._broken(error) from None
            return b""
        if kind == _END:
            self._over = True
        elif kind in (_BINARY, _TEXT) and message:
            channel, data = message[0], bytes(message[1:])
            if channel == _STDOUT:
                return data
            if channel == _STDERR:
                self._tail.feed(data)
            elif channel == _STATUS:
                self._take_status(data)
        return b""

    def _wait(self) -> Routine[None]:
        """Wait for something to read. TLS may have decrypted it already."""
        connection = self._web_socket.sock
        if connection is None or getattr(connection, "pending", int)():
            return
        for _ in range(PINGS):
            if (yield Readable(connection, PING_SECONDS)):
                return
            yield InThread(partial(self._send, b"", _PING))
        self._over = True
        raise ConnectError(self._host, ATTEMPTED, "nothing answers: the network may be cut")

    def _take_status(self, data: bytes) -> None:
        with answer_of(self._host, ATTEMPTED):
            end = program_end(parse_object(data))
        if end.code is None:
            self._over = True
            raise ConnectError(self._host, ATTEMPTED, excerpt(end.message))
        self._status = end.code

    def follow(self, receive: Callable[[bytes | ConnectError], bool]) -> None:
        def pump() -> None:
            while receive(data := self._read_or_error()) and data:
                pass

        threading.Thread(target=pump, daemon=True).start()

    def _read_or_error(self) -> bytes | ConnectError:
        try:
            return self.read()
        except ConnectError as error:
            return error

    def stderr(self) -> bytes:
        return self._tail.contents()

    def wait(self, timeout: float | None = None) -> int:
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while finish(self.reading(), deadline):
            pass
        if self._status is None:
            raise self._broken(None)
        # Runtimes report 128 and the number of a signal, as shells do.
        return 128 - self._status if 128 < self._status <= 192 else self._status

    def close(self) -> None:
        self._closed = True
        connection = self._web_socket.sock
        if connection is not None:
            try:
                connection.shutdown(socket.SHUT_RDWR)  # wakes the reader
            except OSError:
                return

    def _broken(self, error: Exception | None) -> ConnectError:
        reason = excerpt(" ".join(str(error).split())) if error else ""
        return ConnectError(self._host, ATTEMPTED, reason or "the connection to its pod broke")
