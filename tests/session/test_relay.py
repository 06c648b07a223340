"""A relay that is given up at the moment at which it answers."""

from __future__ import annotations

import threading

from dtrain.diagnostics import ConnectError
from dtrain.node import protocol
from dtrain.session.relay import RelayChannel, SilentRelayError
from dtrain.transport.contract import TcpStream
from support.limits import HANG
from support.scripted import ScriptedProcess


class Relay(ScriptedProcess):
    """Its connection and itself. What it has sent is read only once the connection is closed."""

    def __init__(self) -> None:
        super().__init__(protocol.PREAMBLE)
        self.read_begins = threading.Event()
        self.closed = threading.Event()

    def read(self, size: int = 1 << 18) -> bytes:
        self.read_begins.set()
        assert self.closed.wait(HANG)
        return super().read(size)

    def start(self, command: str) -> Relay:
        return self

    def dial(self, port: int, timeout: float) -> TcpStream:
        raise ConnectError("a", "dialing", "refused")

    def close(self) -> None:
        self.closed.set()


def test_a_late_answer_does_not_save_a_relay_that_was_given_up() -> None:
    relay = Relay()
    channel = RelayChannel("a", relay, relay)
    channel.pid = 7
    found: list[Exception] = []

    def read() -> None:
        try:
            list(channel.frames())
        except SilentRelayError as error:
            found.append(error)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    assert relay.read_begins.wait(HANG)
    channel.ping(1)
    assert not relay.closed.is_set()
    channel.ping(1)
    reader.join(HANG)
    assert "does not answer" in str(found[0])
