"""Runs many short conversations over sockets in one thread.

In a check every host dials every other one. A thread for each connection costs several times as
much CPU as the connection itself, and asyncio takes longer to import than all of them together.
"""

from __future__ import annotations

import contextlib
import os
import queue
import selectors
import socket
import threading
import time

READABLE, WRITABLE = selectors.EVENT_READ, selectors.EVENT_WRITE
FOREVER = float("inf")

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Generator, Optional, Tuple, TypeVar

    Wait = Tuple[Optional[socket.socket], int, float]
    """A socket, the event to wait for, and the ``time.monotonic`` until which it must happen.
    Without a socket: nothing but that time."""
    _Result = TypeVar("_Result")
    Steps = Generator[Wait, None, _Result]
    """A conversation, or a part of one. Its sockets do not block: it yields what it waits for.
    `socket.timeout` is raised there if that does not happen in time."""


class SocketLoop:
    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._waits: dict[Steps[None], Wait] = {}
        self._new: queue.SimpleQueue[Steps[None] | None] = queue.SimpleQueue()
        self._woken, self._wake = os.pipe()
        self._selector.register(self._woken, READABLE)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def start(self, conversation: Steps[None]) -> None:
        """Run a conversation, which must raise nothing. Any thread may call this."""
        self._tell(conversation)

    def close(self) -> None:
        """End all conversations, and with them their sockets. May be called again."""
        if self._thread.is_alive():
            self._tell(None)
            self._thread.join()
            os.close(self._woken)
            os.close(self._wake)

    def _tell(self, new: Steps[None] | None) -> None:
        self._new.put(new)
        os.write(self._wake, b".")

    def _run(self) -> None:
        while True:
            # After this process was suspended, data that arrived in between counts as in time.
            now = time.monotonic()
            late = [item for item in self._waits.items() if item[1][2] <= now]
            first = min((until for _, _, until in self._waits.values()), default=FOREVER)
            for key, _ in self._selector.select(None if first == FOREVER else max(0, first - now)):
                if key.data is not None:
                    self._step(key.data)
                    continue
                for _ in os.read(self._woken, 1 << 10):
                    new = self._new.get()
                    if new is None:
                        return self._end()
                    self._step(new)
            for conversation, wait in late:
                if self._waits.get(conversation) is wait:
                    self._step(conversation, late=True)

    def _step(self, conversation: Steps[None], *, late: bool = False) -> None:
        last = self._waits.pop(conversation, (None, 0, FOREVER))
        wait: Wait = (None, 0, FOREVER)
        try:
            wait = conversation.throw(socket.timeout("timed out")) if late else next(conversation)
            self._waits[conversation] = wait
        except StopIteration:
            pass
        if wait[:2] != last[:2]:
            if last[0] is not None:
                self._selector.unregister(last[0])
            if wait[0] is not None:
                self._selector.register(wait[0], wait[1], conversation)

    def _end(self) -> None:
        # A conversation owns its socket only once it has begun.
        while not self._new.empty():
            new = self._new.get()
            if new is not None:
                self._step(new)
        for conversation in self._waits:
            conversation.close()
        self._selector.close()


def sleep(seconds: float) -> Steps[None]:
    with contextlib.suppress(socket.timeout):
        yield None, 0, time.monotonic() + seconds


def receive(sock: socket.socket, size: int, until: float) -> Steps[bytes]:
    """Up to ``size`` bytes; none at the end of the stream. Raises OSError."""
    while True:
        yield sock, READABLE, until
        try:
            return sock.recv(size)
        except BlockingIOError:
            continue


def send(sock: socket.socket, data: bytes, until: float) -> Steps[None]:
    """Send all of ``data``. Raises OSError."""
    left = memoryview(data)
    while left:
        try:
            left = left[sock.send(left) :]
        except BlockingIOError:
            yield sock, WRITABLE, until
