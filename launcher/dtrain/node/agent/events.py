"""The file of events, from which any relay can tell what has happened."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import threading
import time

from dtrain.node.agent.folder import RESERVED, create
from dtrain.node.agent.wire import MAX_PAYLOAD, encode
from dtrain.node.agent.worker_files import Lines, decode, open_regular

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Iterator

    from dtrain.node.agent.wire import Json


MAX_EVENT = MAX_PAYLOAD // 2
"""Bytes of one, which a message has to hold."""
MAX_EVENTS = 64 << 20
"""Bytes of the file that are read to learn how a run stands."""


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


FIELDS: dict[str, dict[str, tuple[type, ...]]] = {
    "started": {"role": (str,), "index": (int,), "rank": (int, type(None)), "pid": (int,)},
    "rank": {"role": (str,), "rank": (int,), "logs": (str,)},
    "exited": {"role": (str,), "index": (int,)},
}
"""What a relay reads of events, and the types."""
ROLE = re.compile(r"[a-z]{1,20}")
MAX_NUMBER = 10**6
"""Of a process or rank: no launch has as many."""


def event_in(line: bytes | None) -> Json | None:
    """One event, or None for a line that no supervisor writes."""
    event = decode(line) if line is not None else None
    if event is None or type(event.get("time")) not in (int, float):
        return None
    kind = event.get("event")
    if not isinstance(kind, str):
        return None
    for name, types in FIELDS.get(kind, {}).items():
        value = event.get(name)
        if type(value) not in types:
            return None
        if name == "role" and not ROLE.fullmatch(str(value)):
            return None
        if name in ("index", "rank") and value is not None and not 0 <= value < MAX_NUMBER:
            return None
    return event


class EventReader:
    """Reads an events file, which a worker may have written to, from ``offset`` on."""

    def __init__(self, file: bytes | int, offset: int = 0) -> None:
        """``file`` is a path, or an open file."""
        self._lines = Lines(file, offset, MAX_EVENT, end=b"\0")

    def read(self) -> list[tuple[Json, int]]:
        """The events that are complete by now, each with the offset of the next one."""
        found = []
        for line, end in self._lines.read():
            event = event_in(line)
            if event is not None:
                found.append((event, end))
        return found

    def all(self) -> Iterator[Json]:
        """The events that are there by now."""
        before = -1
        while before < self._lines.offset < MAX_EVENTS:
            before = self._lines.offset
            for event, _ in self.read():
                yield event


def damage(path: bytes) -> str:
    """What shows that a process of the job has changed the events file; empty if nothing does."""
    try:
        fd = open_regular(path)
    except FileNotFoundError:
        return "is missing"
    except OSError:
        return "is not the supervisor's file"
    try:
        return "is too short" if os.fstat(fd).st_size < RESERVED else ""
    finally:
        os.close(fd)
