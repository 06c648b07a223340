"""The run's journal: what happened, one line of JSON per event, in the order of time.

`dtrain ps`, `logs`, `attach` and `stop` rebuild the state of a run from it. It holds no secret:
plans carry the names of secrets, never their values.

A line has ``schema``, ``time`` (seconds since the epoch), ``event`` (the kind of the event) and the
event's own fields. `Journal` writes events and `JournalReader` reads them back. A journal may be
damaged, so the reader checks every line and counts those that it cannot read.
"""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import asdict, is_dataclass
from enum import Enum
from pathlib import Path

from dtrain.messages.agent import Time
from dtrain.messages.decode import ProtocolError, decode, parse_object
from dtrain.node.descriptors import closing_fd
from dtrain.runs.events import EVENTS, JournalEvent
from dtrain.runs.stored_file import open_stored, stored_reader, unreadable

SCHEMA = 1
MAX_LINE = 1 << 26
"""Bytes of one line. The longest is the end of a run in which every worker failed."""
END = b'"event": "finished"'
"""In the journal of every run that is over, and of no other: in a text, the quotes are escaped."""
_RETIRED = b'"event": "sizes"'
"""Of an earlier version; no part of a run's story."""


def encode(time: float, event: JournalEvent) -> bytes:
    """The event as a line of the journal."""
    body = {"schema": SCHEMA, "time": round(time, 6), "event": event.kind, **event.as_json()}
    return json.dumps(body, default=_plain).encode() + b"\n"


def read_line(line: bytes) -> tuple[float, JournalEvent]:
    """The time and the event of a line. Raises ProtocolError for a line that `encode` did not
    write."""
    body = parse_object(line)
    if body.get("schema") != SCHEMA:
        raise ProtocolError("written by another version of dtrain")
    kind = body.get("event")
    if not isinstance(kind, str) or kind not in EVENTS:
        raise ProtocolError("an unknown event")
    return decode(Time, body.get("time"), "time"), EVENTS[kind].from_json(body)


class Journal:
    """Appends to one file, from any thread.

    A journal that cannot be written, because the disk is full for example, loses the event: a
    record of a run must not end the run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._checked = False

    def write(self, time: float, event: JournalEvent) -> OSError | None:
        """Append one event. ``time`` is seconds since the epoch. Returns why the event is lost."""
        line = encode(time, event)
        with self._lock:
            try:
                with closing_fd(self._open()) as fd:
                    size = os.fstat(fd).st_size
                    # A crash or a full disk may have cut the last line short.
                    torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
                    line = b"\n" * torn + line
                    if os.write(fd, line) < len(line):  # the rest did not fit
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError as error:
                return error
        return None

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
        if self._checked:
            return os.open(self.path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        # Checked once: it takes longer than to write an event.
        fd = open_stored(self.path, flags)
        self._checked = True
        return fd


class JournalReader:
    """Reads a journal that another process may be writing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.unreadable = 0
        """Lines that were skipped so far: they are damaged, or another version wrote them."""
        self._offset = 0
        self._too_long = False

    def read(self) -> Iterator[tuple[float, JournalEvent]]:
        """The events since the last call, each with its time. A line that is still being written
        is left for the next call. A missing journal has no events.

        Raises UsageError if there is something else in its place, or another user can change it.
        """
        try:
            with stored_reader(self.path) as file:
                file.seek(self._offset)
                while line := file.readline(MAX_LINE):
                    whole = line.endswith(b"\n")
                    if not whole and len(line) < MAX_LINE:
                        return
                    self._offset += len(line)
                    if whole and not self._too_long:
                        try:
                            yield read_line(line)
                        except ProtocolError:
                            self.unreadable += _RETIRED not in line
                    elif whole:
                        self.unreadable += 1
                    self._too_long = not whole
        except FileNotFoundError:
            return
        except OSError as error:
            raise unreadable(self.path, error) from None


def _plain(value: object) -> object:
    """What the ``json`` module does not write by itself."""
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"no JSON for {type(value)}")
