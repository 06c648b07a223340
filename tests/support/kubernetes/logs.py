"""A container's log, as a container runtime stores it and a kubelet serves it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from support.kubernetes import clock

LONGEST = 16 * 1024
"""The runtime stores a longer line in parts of this size."""


class Entry(NamedTuple):
    moment: int
    text: bytes
    """Without a line break at the end: a part of a line."""


def previous(container: str) -> str:
    """The name of the log of the container that ran before it was started again."""
    return f"{container}:previous"


class Log:
    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._first = 0
        """The entries before are in older files, which are not served."""
        self._rest = b""
        self._ended = False
        self._cuts = 0
        self._changed = threading.Condition()

    def feed(self, data: bytes) -> None:
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        entries = []
        for line in lines:
            parts = [line[at : at + LONGEST] for at in range(0, len(line), LONGEST)] or [b""]
            entries += [Entry(time.time_ns(), part) for part in parts[:-1]]
            entries.append(Entry(time.time_ns(), parts[-1] + b"\n"))
        with self._changed:
            self._entries += entries
            self._changed.notify_all()

    def end(self) -> None:
        """The container has ended. A last line without a line break gets one."""
        if self._rest:
            self.feed(b"\n")
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def rotate(self) -> None:
        """Begin a new file: what has been written before is served no more."""
        with self._changed:
            self._first = len(self._entries)

    def cut(self) -> None:
        """End every stream."""
        with self._changed:
            self._cuts += 1
            self._changed.notify_all()

    def tail(self, count: int) -> bytes:
        with self._changed:
            return b"".join(entry.text for entry in self._entries)[-count:]

    def read(
        self,
        *,
        follow: bool = False,
        since: int = 0,
        tail: int | None = None,
        limit: int | None = None,
        timestamps: bool = False,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Iterator[bytes]:
        """The chunks of one answer. ``since`` is in nanoseconds since the epoch."""
        with self._changed:
            cuts = self._cuts
            at = self._first
            if tail is not None:
                ends = [
                    number
                    for number, entry in enumerate(self._entries)
                    if number >= at and entry.text.endswith(b"\n")
                ]
                at = max(at, ends[-tail - 1] + 1 if len(ends) > tail else at)
                at = at if tail else len(self._entries)
        begins = True
        while True:
            with self._changed:
                at = max(at, self._first)
                while follow and at == len(self._entries) and not self._ended:
                    if self._cuts > cuts or stopped():
                        return
                    self._changed.wait(0.5)
                    at = max(at, self._first)
                found = self._entries[at:]
                over = not found or self._cuts > cuts or stopped()
            at += len(found)
            pieces = []
            for moment, text in found:
                if moment >= since:
                    if timestamps and begins:
                        pieces.append(clock.nanoseconds(moment).encode() + b" ")
                    pieces.append(text)
                    begins = text.endswith(b"\n")
            chunk = b"".join(pieces)
            if limit is not None:
                chunk = chunk[:limit]
                limit -= len(chunk)
            if chunk:
                yield chunk
            if over or limit == 0 or not follow:
                return
