"""The output of a command on an SSH channel."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import cast

import paramiko
from paramiko.buffered_pipe import BufferedPipe
from paramiko.common import cMSG_CHANNEL_WINDOW_ADJUST

from dtrain.transport.threads import blocking

WINDOW = 4 << 20
"""Bytes that a process can write ahead of its reader."""


def _refuse(data: bytes) -> bool:
    """The pipe has ended, or its receiver wants no more."""
    return False


class OutputPipe(BufferedPipe):  # type: ignore[type-arg]
    """A command's stdout or stderr: for a reader, or from `follow` on passed to a function in the
    connection's thread, which saves a thread for each host and a copy."""

    def __init__(self, channel: paramiko.Channel) -> None:
        super().__init__()
        self._channel = channel
        self._receive: Callable[[bytes], bool] | None = None
        self._switch = threading.Lock()
        self._unacknowledged = 0
        """Bytes that `feed` has passed on. Only the connection's thread uses it."""

    def follow(self, receive: Callable[[bytes], bool]) -> None:
        """Pass all data to ``receive``, and ``b""`` at the end, until it returns False."""
        with self._switch:
            self._receive = receive
            count = self._pass_on(self.empty())
        # It may be the whole window: the server then sends nothing more.
        with suppress(paramiko.SSHException, EOFError, OSError):  # the pipe's end reports it
            self._acknowledge(count)
        if self._closed:  # type: ignore[attr-defined]
            self._end()

    def feed(self, data: bytes) -> None:
        with self._switch:
            if self._receive is None:
                super().feed(data)
            else:
                self._unacknowledged += self._pass_on(data)
        if self._unacknowledged >= WINDOW // 8:
            count, self._unacknowledged = self._unacknowledged, 0
            self._acknowledge(count)

    def _pass_on(self, data: bytes) -> int:
        """Returns how many bytes to acknowledge."""
        # A server may send an empty piece, which is not the end.
        if not data or self._receive is None:
            return 0
        if self._receive(data):
            return len(data)
        # Without an acknowledgement, the server stops once it has filled the window.
        self._receive = _refuse
        return 0

    def close(self) -> None:
        # paramiko holds the channel's lock, and the caller may hold others.
        super().close()
        blocking.run(self._end)

    def _end(self) -> None:
        with self._switch:
            receive, self._receive = self._receive, _refuse
            if receive is not None:
                receive(b"")

    def _acknowledge(self, count: int) -> None:
        """Let the server send ``count`` more bytes, unless these can wait for later ones."""
        window = self._channel._check_add_window(count)  # type: ignore[attr-defined]
        if window:
            adjust = paramiko.Message()
            adjust.add_byte(cMSG_CHANNEL_WINDOW_ADJUST)
            adjust.add_int(self._channel.remote_chanid)
            adjust.add_int(window)
            transport = cast(paramiko.Transport, self._channel.transport)
            transport._send_user_message(adjust)  # type: ignore[attr-defined]
