"""A supervisor that can open no more files does not spin."""

from __future__ import annotations

import errno
import os
import signal
import socket
import time

from dtrain.node.agent.control_server import ControlServer
from dtrain.node.listening import EXHAUSTED_PAUSE


class Exhausted(socket.socket):
    def accept(self) -> tuple[socket.socket, object]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_a_client_that_cannot_be_accepted_waits() -> None:
    ours, theirs = socket.socketpair()
    before = signal.set_wakeup_fd(-1)
    try:
        server = ControlServer(theirs, lambda *_: None, lambda: None, lambda: None)
        with ours, theirs, Exhausted() as listener:
            begun = time.monotonic()
            server._accept(listener)
            assert time.monotonic() - begun >= EXHAUSTED_PAUSE
    finally:
        signal.set_wakeup_fd(before)
