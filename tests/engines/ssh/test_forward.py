"""A port of a host on this machine."""

from __future__ import annotations

import errno
import os
import socket

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
