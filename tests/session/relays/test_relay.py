"""A relay that is given up at the moment at which it answers, and a writer that never started."""

from __future__ import annotations

import threading

import pytest

from dtrain.diagnostics import ConnectError
from dtrain.node import protocol
from dtrain.session.relays import relay as session_relay
from dtrain.session.relays.relay import CommandWriter, RelayChannel, SilentRelayError, heartbeat
from dtrain.transport.contract import TcpStream
from dtrain.transport.threads import Threads
from support.limits import HANG
from support.scripted import ScriptedProcess
from support.threads import no_free_thread


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
    channel = RelayChannel("a", relay, relay, "python3")
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


def test_a_writer_that_starts_after_its_end_sends_no_pings() -> None:
    writer = CommandWriter[dict[str, str]](lambda: None, lambda bug: None)
    writer.finish()
    writer.start()
    writer.join(HANG)
    assert writer.ping not in heartbeat._calls


class Broken(Relay):
    """A bug: a write raises what nobody expects, once."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self._bug: Exception | None = ValueError("a bug")

    def write(self, data: bytes) -> None:
        bug, self._bug = self._bug, None
        if bug is not None:
            raise bug
        self.written.append(data)


def test_commands_follow_one_whose_write_raises() -> None:
    relay, raised = Broken(), list[Exception]()
    writer = CommandWriter[dict[str, str]](lambda: None, raised.append)
    writer.relay = RelayChannel("a", relay, relay, "python3")
    writer.start()
    writer.send({"op": "start"})
    writer.send({"op": "kill"})
    writer.finish()
    assert writer._idle.wait(HANG)
    assert [str(bug) for bug in raised] == ["a bug"]
    assert relay.written == [protocol.encode_command({"op": "kill"})]


def test_commands_are_sent_once_the_machine_has_a_free_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session_relay, "blocking", Threads("few threads"))
    relay = Broken()
    relay._bug = None
    writer = CommandWriter[dict[str, str]](lambda: None, lambda bug: None)
    writer.relay = RelayChannel("a", relay, relay, "python3")
    with no_free_thread(monkeypatch, "few threads"):
        writer.start()
        writer.send({"op": "start"})
    writer.ping()  # of the heartbeat
    writer.finish()
    assert writer._idle.wait(HANG)
    assert relay.written[0] == protocol.encode_command({"op": "start"})


def test_a_relay_may_go_away_while_a_command_is_sent() -> None:
    relay, bugs = Broken(), list[Exception]()
    relay._bug = None
    channels: list[RelayChannel | None] = [RelayChannel("a", relay, relay, "python3")]

    class Writer(CommandWriter[dict[str, str]]):
        @property
        def relay(self) -> RelayChannel | None:  # type: ignore[override]
            return channels.pop() if channels else None

        @relay.setter
        def relay(self, channel: RelayChannel | None) -> None: ...

    writer = Writer(lambda: None, bugs.append)
    writer.start()
    writer.send({"op": "cancel"})
    writer.finish()
    assert writer._idle.wait(HANG)
    assert bugs == []
    assert relay.written == [protocol.encode_command({"op": "cancel"})]
