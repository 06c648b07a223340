"""A port of a host on this machine."""

from __future__ import annotations

import errno
import os
import socket
import threading

import pytest

from dtrain.engines.ssh import forward
from dtrain.engines.ssh.forward import Forward
from support.limits import HANG
from support.scripted import ScriptedHosts


class Dialled(ScriptedHosts):
    """A connection to a host whose port is one end of a pair of sockets."""

    def __init__(self) -> None:
        self.page, self._port = socket.socketpair()
        self.page.settimeout(HANG)

    def dial(self, port: int, timeout: float) -> socket.socket:
        return self._port


class Exhausted(socket.socket):
    """A listener in a process that can open no more files at first."""

    _open = True

    def accept(self) -> tuple[socket.socket, object]:
        if self._open:
            self._open = False
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()


def test_a_page_is_shown_once_this_process_can_open_files_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listener = Exhausted(fileno=socket.create_server(("127.0.0.1", 0)).detach())
    monkeypatch.setattr(forward, "_listen", lambda port: listener)
    host = Dialled()
    shown = Forward(6006, lambda: host)
    with socket.create_connection(("127.0.0.1", shown.port), HANG) as browser, host.page:
        browser.sendall(b"GET /")
        assert host.page.recv(5) == b"GET /"
        host.page.sendall(b"page")
        assert browser.recv(4) == b"page"
    shown.close()


@pytest.mark.parametrize("free", [0, 1])
def test_a_page_is_shown_once_this_machine_has_free_threads_again(
    monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    start, left = threading.Thread.start, [True] * free + [False]

    def limited(thread: threading.Thread) -> None:
        # Other tests may have left threads that start threads.
        ours = thread.name.endswith(("(_serve)", "(_pump)"))
        if ours and left and not left.pop(0):
            raise RuntimeError("can't start new thread")
        start(thread)

    hosts = [Dialled() for _ in range(free + 1)]
    unused = iter(hosts)
    shown = Forward(6006, lambda: next(unused))
    monkeypatch.setattr(threading.Thread, "start", limited)
    with socket.create_connection(("127.0.0.1", shown.port), HANG) as browser:
        assert browser.recv(1) == b""
    with socket.create_connection(("127.0.0.1", shown.port), HANG) as browser:
        browser.sendall(b"GET /")
        assert hosts[-1].page.recv(5) == b"GET /"
    shown.close()
    for host in hosts:
        host.page.close()
