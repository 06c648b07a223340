"""ssh's ProxyCommand: a program whose stdin and stdout are the connection."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import threading
from contextlib import suppress

from dtrain.transport.tail import Tail

KILL_AFTER = 2.0
"""Seconds between TERM and KILL."""


class ProxyCommand:
    """Runs ``command`` in the user's shell, as ssh does. A Stream for LiveSocket.

    One end of a socket pair is the program's stdin and stdout, so that the other end behaves like
    any socket. If this process dies, the program reads end of file. Raises OSError if the program
    cannot be started.
    """

    def __init__(self, command: str) -> None:
        self.command = command
        shell = os.environ.get("SHELL") or "/bin/sh"
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._popen = subprocess.Popen(
                [shell, "-c", f"exec {command}"],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        self._tail = Tail()
        self._ended = threading.Event()
        threading.Thread(target=self._attend, daemon=True).start()
        self._closing = threading.Lock()
        self._closed = False

    def send(self, data: bytes) -> int:
        return self._socket.send(data)

    def recv(self, size: int) -> bytes:
        return self._socket.recv(size)

    def settimeout(self, seconds: float | None) -> None:
        self._socket.settimeout(seconds)

    def close(self) -> None:
        with self._closing:
            if self._closed:
                return
            self._closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._signal(signal.SIGTERM)
        threading.Thread(target=self._kill_if_needed, daemon=True).start()

    @property
    def status(self) -> int | None:
        """The exit status, or None if the program still runs after a short wait."""
        self._ended.wait(0.5)
        return self._popen.poll()

    def explain(self) -> str:
        """How the program ended and the end of its stderr, for an error message."""
        output = self._tail.contents().decode(errors="replace")
        # Since OpenSSH 10.1, ssh begins with a warning about key exchanges of old servers.
        output = re.sub(r"^\*\* .*\n", "", output, flags=re.MULTILINE).strip()
        status = self.status
        how = "is still running" if status is None else f"exited with status {status}"
        return f"its ProxyCommand ({self.command}) {how}" + (f": {output[-500:]}" if output else "")

    def _attend(self) -> None:
        assert self._popen.stderr  # noqa: S101 (for the type checker)
        with self._popen.stderr as pipe:
            while data := os.read(pipe.fileno(), 1 << 14):
                self._tail.feed(data)
        self._popen.wait()
        self._ended.set()

    def _kill_if_needed(self) -> None:
        try:
            self._popen.wait(KILL_AFTER)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self._popen.poll() is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._popen.pid, number)
