"""The events file, from which every relay can read the history of the run."""

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
from dtrain.node.descriptors import closing_fd

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Iterator

    from dtrain.node.agent.wire import Json


MAX_EVENT = MAX_PAYLOAD // 2
"""Bytes of one event, which must fit into a message."""
EVIDENCE = ("code", "kernel", "stack", "collectives", "ras")
"""Long events that a run may lose."""
SPARE = 32 << 10
"""Bytes that they, and the details of others, leave free: a full disk must not hide how a run
ended."""
NO_RESERVE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
"""Errors of a file system that cannot reserve space."""
MAX_EVENTS = 64 << 20
"""Bytes of the file that are read to learn the state of a run."""
MAX_EVIDENCE = MAX_EVENTS // 2
"""Bytes of the file after which more evidence is lost: its reader must reach the end of the run."""


class Events:
    """The supervisor's side of the events file: lines of JSON, zeros after the last one."""

    def __init__(self, folder: int) -> None:
        self._fd = create(b"events", folder)
        self._end = 0
        self._lock = threading.Lock()
        try:
            os.posix_fallocate(self._fd, 0, RESERVED)
        except OSError as error:
            if error.errno not in NO_RESERVE:
                raise
            os.pwrite(self._fd, b"\0" * RESERVED, 0)

    def append(self, kind: str, **body: Any) -> None:
        event = {"event": kind, "time": time.time(), **body}
        line = encode(event) + b"\n"
        with self._lock:
            room = self._has_room(len(line) + SPARE)
            if kind in EVIDENCE and not (room and self._end < MAX_EVIDENCE):
                return
            if not room or not self._write(line):
                # The disk and the reserve are full, or the event is too long: drop its details.
                event.update({name: None for name in ("error", "ranks") if name in event})
                self._write(encode(event) + b"\n")

    def _has_room(self, size: int) -> bool:
        """Whether the disk has room for ``size`` more bytes of events."""
        try:
            os.posix_fallocate(self._fd, self._end, size)
        except OSError as error:
            return error.errno in NO_RESERVE
        return True

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
"""The fields of events that a relay reads, and their types."""
ROLE = re.compile(r"[a-z]{1,20}")
MAX_NUMBER = 10**6
"""Limit for the number of a process or rank."""


def event_in(line: bytes | None) -> Json | None:
    """The event in ``line``; None if no supervisor writes such a line."""
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
    """Reads an events file. A worker may have changed the file."""

    def __init__(self, file: bytes | int) -> None:
        """``file`` is a path or an open file."""
        self._lines = Lines(file, 0, MAX_EVENT, end=b"\0")

    @property
    def offset(self) -> int:
        """How far it has read. One `read` may not reach the end."""
        return self._lines.offset

    def read(self) -> list[tuple[Json, int]]:
        """The new events, each with the offset of the next one."""
        found = []
        for line, end in self._lines.read():
            event = event_in(line)
            if event is not None:
                found.append((event, end))
        return found

    def all(self) -> Iterator[Json]:
        """All events written so far."""
        before = -1
        while before < self.offset < MAX_EVENTS:
            before = self.offset
            for event, _ in self.read():
                yield event


def damage(path: bytes) -> str:
    """Evidence that a process of the job has changed the events file; empty if there is none."""
    try:
        fd = open_regular(path)
    except FileNotFoundError:
        return "is missing"
    except OSError:
        return "is not the supervisor's file"
    with closing_fd(fd):
        return "is too short" if os.fstat(fd).st_size < RESERVED else ""
