"""The file of events, from which any relay can tell what has happened."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading
import time

from dtrain.node.agent.folder import RESERVED, create
from dtrain.node.agent.wire import MAX_PAYLOAD, encode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from dtrain.node.agent.wire import Json


MAX_EVENT = MAX_PAYLOAD // 2
"""Bytes of one, which a message has to hold."""


class Events:
    """The supervisor's side of the events file: lines of JSON, zeros after the last one."""

    def __init__(self, folder: int) -> None:
        self._fd = create(b"events", folder)
        self._end = 0
        self._lock = threading.Lock()
        try:
            os.posix_fallocate(self._fd, 0, RESERVED)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
            os.pwrite(self._fd, b"\0" * RESERVED, 0)

    def append(self, kind: str, **body: Any) -> None:
        event = {"event": kind, "time": time.time(), **body}
        with self._lock:
            if not self._write(encode(event) + b"\n"):
                # The disk is full and the reserve used up, or it is too long: what happened matters
                # more than details.
                event.update({name: None for name in ("error", "ranks") if name in event})
                self._write(encode(event) + b"\n")

    def _write(self, line: bytes) -> bool:
        if len(line) > MAX_EVENT:
            return False
        done = 0
        try:
            while done < len(line):
                done += os.pwrite(self._fd, line[done:], self._end + done)
        except OSError:
            with contextlib.suppress(OSError):
                os.pwrite(self._fd, b"\0" * done, self._end)
            return False
        self._end += len(line)
        return True


def read_events(path: bytes, offset: int) -> list[tuple[Json, int]]:
    """The complete events from ``offset`` on, each with the offset at which the next begins."""
    found: list[tuple[Json, int]] = []
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return found
    try:
        data = os.pread(fd, 4 << 20, offset)
    finally:
        os.close(fd)
    for line in data.partition(b"\0")[0].splitlines(True):
        if not line.endswith(b"\n"):
            break
        offset += len(line)
        with contextlib.suppress(ValueError):  # the offset lay inside a line
            found.append((json.loads(line), offset))
    return found


def all_events(path: bytes) -> list[Json]:
    """Those that are there by now."""
    events: list[Json] = []
    found = read_events(path, 0)
    while found:
        events += [event for event, _ in found]
        found = read_events(path, found[-1][1])
    return events


def last_line(path: bytes) -> int:
    """Where the last line of a file begins, if it is not too long."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        start = max(0, os.fstat(fd).st_size - (4 << 10))
        return start + os.pread(fd, 4 << 10, start).rstrip().rfind(b"\n") + 1
    finally:
        os.close(fd)
