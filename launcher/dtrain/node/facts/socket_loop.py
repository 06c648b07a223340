"""Runs many short conversations over sockets in one thread.

In a check every host dials every other one. A thread for each connection costs several times as
much CPU as the connection itself, and asyncio takes longer to import than all of them together.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections import deque

READABLE, WRITABLE = select.EPOLLIN, select.EPOLLOUT
FOREVER = float("inf")

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Generator, Optional, Tuple, TypeVar

    Wait = Tuple[Optional[socket.socket], int, float]
    """A socket, the event to wait for, and the ``time.monotonic`` until which it must happen.
    Without a socket: nothing but that time."""
    _Result = TypeVar("_Result")
    Steps = Generator[Wait, None, _Result]
    """A conversation, or a part of one. It yields what it waits for. `socket.timeout` is raised
    there if that does not happen in time, and another OSError if this host cannot wait for it."""

NOTHING: Wait = (None, 0, FOREVER)


class SocketLoop:
    """`selectors` would take more time than the kernel."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._waits: dict[Steps[None], Wait] = {}
        self._waiting: dict[int, Steps[None]] = {}
        """The conversation that waits for a descriptor."""
        self._first = FOREVER
        """No wait ends earlier. To compute it at each event would take longer than the event."""
        self._new: deque[tuple[Steps[None], ...] | None] = deque()
        self._woken, self._wake = os.pipe()
        self._poll.register(self._woken, READABLE)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def start(self, *conversations: Steps[None]) -> None:
        """Run conversations, which must raise nothing. Any thread may call this."""
        if threading.get_ident() == self._thread.ident:
            for one in conversations:
                self._step(one)
        else:
            self._tell(conversations)

    def close(self) -> None:
        """End all conversations, and with them their sockets. May be called again."""
        if self._thread.is_alive():
            self._tell(None)
            self._thread.join()
            os.close(self._woken)
            os.close(self._wake)

    def _tell(self, new: tuple[Steps[None], ...] | None) -> None:
        self._new.append(new)
        os.write(self._wake, b".")

    def _run(self) -> None:
        while True:
            # After this process was suspended, data that arrived in between counts as in time.
            now = time.monotonic()
            late = []
            if self._first <= now:
                late = [item for item in self._waits.items() if item[1][2] <= now]
                self._first = min((until for _, _, until in self._waits.values()), default=FOREVER)
            pause = None if self._first == FOREVER else max(0, self._first - now)
            for fd, _ in self._poll.poll(pause):
                if fd == self._woken:
                    for _ in os.read(fd, 1 << 10):
                        new = self._new.popleft()
                        if new is None:
                            return self._end()
                        self.start(*new)
                elif fd in self._waiting:
                    self._step(self._waiting[fd])
            for conversation, wait in late:
                if self._waits.get(conversation) is wait:
                    self._step(conversation, late=True)

    def _step(self, conversation: Steps[None], *, late: bool = False) -> None:
        error: OSError | None = socket.timeout("timed out") if late else None
        while True:
            error = self._advance(conversation, error)
            if error is None:
                return

    def _advance(self, conversation: Steps[None], error: OSError | None) -> OSError | None:
        """Run a conversation until it waits again. ``error`` is raised in it. Returns why it cannot
        wait."""
        sock, event, _ = self._waits.pop(conversation, NOTHING)
        fd = -1 if sock is None else sock.fileno()
        wait = NOTHING
        try:
            wait = next(conversation) if error is None else conversation.throw(error)
            self._waits[conversation] = wait
            self._first = min(self._first, wait[2])
        except StopIteration:
            pass
        if wait[0] is sock and wait[1] == event:
            return None
        if sock is not None:
            if self._waiting.get(fd) is conversation:  # another one may have opened it by now
                del self._waiting[fd]
            if sock.fileno() >= 0:
                self._poll.unregister(fd)
        if wait[0] is not None:
            fd = wait[0].fileno()
            try:
                self._poll.register(fd, wait[1])
            except OSError as refused:  # the user's processes may watch no more sockets
                del self._waits[conversation]
                return refused
            self._waiting[fd] = conversation
        return None

    def _end(self) -> None:
        # A conversation owns its socket only once it has begun.
        while self._new:
            self.start(*(self._new.popleft() or ()))
        for conversation in self._waits:
            conversation.close()
        self._poll.close()


def sleep(seconds: float) -> Steps[None]:
    with contextlib.suppress(socket.timeout):
        yield None, 0, time.monotonic() + seconds


def receive(sock: socket.socket, size: int, until: float) -> Steps[bytes]:
    """Up to ``size`` bytes; none at the end of the stream. Raises OSError."""
    while True:
        yield sock, READABLE, until
        try:
            return sock.recv(size, socket.MSG_DONTWAIT)
        except BlockingIOError:
            continue


def send(sock: socket.socket, data: bytes, until: float) -> Steps[None]:
    """Send all of ``data``. Raises OSError."""
    left = memoryview(data)
    while left:
        try:
            left = left[sock.send(left, socket.MSG_DONTWAIT) :]
        except BlockingIOError:
            yield sock, WRITABLE, until
