"""The run's journal: what happened, a line of JSON each, appended as it happens.

Enough to tell afterwards what a run was and how it went. It holds no secret: plans carry the
names of secrets, never their values.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dtrain.diagnostics import UsageError
from dtrain.node.trust import Trust, UnsafeError

SCHEMA = 1


class Journal:
    """Appends to one file, from any thread.

    A journal that cannot be written (a full disk) falls silent: it records a run, and must not
    be what ends it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()

    def write(self, time: float, event: str, **details: Any) -> None:
        """Append one event. ``time`` is seconds since the epoch; details are JSON values."""
        line = json.dumps({"schema": SCHEMA, "time": round(time, 6), "event": event, **details})
        with self._lock:
            try:
                flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
                fd = Trust().open_path(os.fsencode(self.path), flags)
                try:
                    size = os.fstat(fd).st_size
                    # A crash or a full disk may have cut the last line short.
                    torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
                    os.write(fd, b"\n" * torn + line.encode() + b"\n")
                finally:
                    os.close(fd)
            except OSError:
                return


class JournalReader:
    """Follows a journal that another process may be writing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def read(self) -> Iterator[dict[str, Any]]:
        """The events that have come since the last time, but for a line that is not whole yet.

        Nothing where there is no journal. A line that a crash cut short is skipped, and so is one
        of a later version. Raises UsageError if another user can change the journal.
        """
        try:
            with os.fdopen(Trust().open_path(os.fsencode(self.path), os.O_RDONLY), "rb") as file:
                file.seek(self._offset)
                data = file.read()
        except UnsafeError as error:
            raise UsageError(error.reason, hint=error.hint("DTRAIN_HOME")) from None
        except OSError:
            return
        for line in data.splitlines(keepends=True):
            if not line.endswith(b"\n"):
                return
            self._offset += len(line)
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict) and event.get("schema") == SCHEMA:
                yield event
