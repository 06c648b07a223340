"""A peer that is silent, without a peer."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import paramiko
import pytest

from dtrain.transport import live_socket
from dtrain.transport.live_socket import LiveSocket
from support.limits import HANG


class Silent:
    """A stream that never gets data. Each read takes its timeout, or as long as ``pause`` says."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.pause = 0.0
        self._timeout = 0.0

    def settimeout(self, seconds: float | None) -> None:
        self._timeout = seconds or 0.0

    def recv(self, size: int) -> bytes:
        self.now += self.pause or self._timeout
        raise TimeoutError

    def send(self, data: bytes) -> int:
        return len(data)

    def close(self) -> None:
        pass


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Silent:
    stream = Silent()
    monkeypatch.setattr(live_socket, "time", SimpleNamespace(monotonic=lambda: stream.now))
    return stream


def reads_until_lost(live: LiveSocket) -> int:
    for reads in range(1, 100):
        try:
            live.recv(1)
        except TimeoutError:
            continue
        except ConnectionAbortedError:
            return reads
    raise AssertionError("never lost")


def test_a_silent_peer_is_asked_and_then_lost(stream: Silent) -> None:
    live, asked = LiveSocket(stream), []
    live.watch(4.0, 3, lambda: asked.append(stream.now))
    assert reads_until_lost(live) == 13
    assert asked == [1004.0, 1008.0, 1012.0]


def test_time_in_which_this_process_stood_still_is_no_silence(stream: Silent) -> None:
    """After Ctrl-Z, or on a machine that was suspended, the peer's answer is not read yet."""
    live = LiveSocket(stream)
    live.watch(4.0, 3, lambda: None)
    stream.pause = 3600.0
    for _ in range(2):
        with pytest.raises(TimeoutError):
            live.recv(1)
    stream.pause = 0.0
    assert reads_until_lost(live) == 11  # each of the two pauses counted as one read


def test_the_end_of_a_connection_over_a_dead_jump_host_does_not_wait() -> None:
    begun, go, ended = threading.Event(), threading.Event(), threading.Event()

    class Stuck(paramiko.Channel):
        def close(self) -> None:
            begun.set()
            assert go.wait(HANG)
            ended.set()

    LiveSocket(Stuck(0)).close()
    assert begun.wait(HANG)
    go.set()
    assert ended.wait(HANG)
