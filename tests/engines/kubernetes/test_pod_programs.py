"""Programs in pods, on a WebSocket that a test holds the other end of."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import websocket

from dtrain.diagnostics import ConnectError
from dtrain.engines.kubernetes import pod_programs
from dtrain.engines.kubernetes.pod_programs import PodProcess
from support.limits import HANG


@pytest.fixture
def pair() -> Iterator[tuple[PodProcess, socket.socket]]:
    """A process, and the API server's end of its connection."""
    here, there = socket.socketpair()
    there.settimeout(HANG)
    with here, there:
        web_socket = websocket.WebSocket()
        web_socket.sock, web_socket.connected = here, True
        yield PodProcess("node0", web_socket), there


def test_half_of_a_message_does_not_stop_those_who_write(
    pair: tuple[PodProcess, socket.socket],
) -> None:
    """The network may be cut then, and Ctrl-C must still end `dtrain exec`."""
    process, there = pair
    there.sendall(b"\x82\x04\x01ab")
    with pytest.raises(TimeoutError):
        process.wait(0.01)
    process.write(b"data")
    assert there.recv(100)
    there.sendall(b"c")
    assert process.read() == b"abc"


def test_a_quiet_connection_gets_pings(
    pair: tuple[PodProcess, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is given up if nothing answers them."""
    process, there = pair
    monkeypatch.setattr(pod_programs, "PING_SECONDS", 0.001)
    with pytest.raises(ConnectError, match="nothing answers"):
        process.read()
    assert there.recv(100)[0] == 0x89
