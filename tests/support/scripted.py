"""A transport whose hosts send scripted output and ignore their input."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping

from dtrain.diagnostics import ConnectError
from dtrain.node import protocol
from dtrain.node.agent.wire import PREAMBLE
from dtrain.spec.model import Host
from dtrain.transport.contract import TcpStream
from support.limits import HANG

PIECE = 4093
"""Bytes of one read: messages are cut anywhere."""


def relay_stdout(payloads: Iterable[bytes]) -> bytes:
    """The stdout of a relay that sends ``payloads`` as messages, whatever they are."""
    frames = [protocol.HEADER.pack(protocol.MESSAGE, 0, 0, len(one)) + one for one in payloads]
    return PREAMBLE + b"".join(frames)


class ScriptedProcess:
    """Writes ``said`` to its stdout and ends with status 0."""

    def __init__(self, said: bytes) -> None:
        self._said = memoryview(said)

    def write(self, data: bytes) -> None:
        pass

    def close_stdin(self) -> None:
        pass

    def read(self, size: int = 1 << 18) -> bytes:
        piece = bytes(self._said[: min(size, PIECE)])
        self._said = self._said[len(piece) :]
        return piece

    def follow(self, receive: Callable[[bytes | ConnectError], bool]) -> None:
        def pump() -> None:
            while receive(data := self.read()) and data:
                pass

        threading.Thread(target=pump, daemon=True).start()

    def stderr(self) -> bytes:
        return b""

    def wait(self, timeout: float | None = None) -> int:
        return 0

    def close(self) -> None:
        pass


class ScriptedHosts:
    """A transport, and each connection of it. ``said`` is by host."""

    def __init__(self, said: Mapping[str, bytes], host: str = "") -> None:
        self._said = said
        self._host = host

    def connect(self, host: Host) -> ScriptedHosts:
        return ScriptedHosts(self._said, host.name)

    def start(self, command: str) -> ScriptedProcess:
        return ScriptedProcess(self._said[self._host])

    def dial(self, port: int, timeout: float) -> TcpStream:
        raise ConnectError(self._host, f"connecting to its port {port}", "connection refused")

    def close(self) -> None:
        pass


class SilentHost(ScriptedHosts, ScriptedProcess):
    """A transport, its only connection, and its process that writes nothing until it is closed."""

    def __init__(self) -> None:
        self.opened, self.closed = threading.Event(), threading.Event()

    def connect(self, host: Host) -> SilentHost:
        self.opened.set()
        return self

    def start(self, command: str) -> SilentHost:
        return self

    def read(self, size: int = 1 << 18) -> bytes:
        assert self.closed.wait(HANG)
        return b""

    def close(self) -> None:
        self.closed.set()
