"""Programs in pods, on a WebSocket that a test holds the other end of."""

from __future__ import annotations

import socket

import pytest
import websocket

from dtrain.engines.kubernetes.pod_programs import PodProcess
from support.limits import HANG


def test_half_of_a_message_does_not_stop_those_who_write() -> None:
    """The network may be cut then, and Ctrl-C must still end `dtrain exec`."""
    here, there = socket.socketpair()
    there.settimeout(HANG)
    with here, there:
        web_socket = websocket.WebSocket()
        web_socket.sock, web_socket.connected = here, True
        process = PodProcess("node0", web_socket)
        there.sendall(b"\x82\x04\x01ab")
        with pytest.raises(TimeoutError):
            process.wait(0.01)
        process.write(b"data")
        assert there.recv(100)
        there.sendall(b"c")
        assert process.read() == b"abc"
