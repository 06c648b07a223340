"""Identical lines from several ranks as one line (``--fold``). Pure: ``now`` is an argument."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

Source = TypeVar("Source", bound=Hashable)

WINDOW = 0.2
"""Seconds that a line waits for the same line from other ranks."""
_MAX_WAITING = 20_000


@dataclass(slots=True)
class Folded(Generic[Source]):
    """One line and the sources that wrote it, in order of writing."""

    text: str
    kind: str
    sources: list[Source]
    until: float
    """Time by which the line must be printed."""


class LineFolder(Generic[Source]):
    """Holds each line for a short time and joins equal lines.

    Returns each line exactly once for each rank that wrote it, and keeps the order of each rank's
    lines, of one ``kind`` and of all kinds.
    """

    def __init__(self, window: float = WINDOW) -> None:
        self._window = window
        self._waiting: deque[Folded[Source]] = deque()
        # Line numbers follow the order of output.
        self._first = 0
        self._places: dict[tuple[str, str], list[int]] = {}
        self._last: dict[Source, int] = {}

    @property
    def due(self) -> float | None:
        """Time by which the next line must be printed; None if no line waits."""
        return self._waiting[0].until if self._waiting else None

    def add(self, now: float, source: Source, kind: str, text: str) -> None:
        places = self._places.setdefault((kind, text), [])
        # Join only with a line after this source's last one, to keep the order of its lines.
        at = bisect_right(places, self._last.get(source, -1))
        if at < len(places):
            number = places[at]
            line = self._waiting[number - self._first]
        else:
            number = self._first + len(self._waiting)
            line = Folded(text, kind, [], now + self._window)
            self._waiting.append(line)
            places.append(number)
        line.sources.append(source)
        self._last[source] = number

    def take(self, now: float) -> Iterator[Folded[Source]]:
        """Yield the lines that have waited long enough, and the oldest if too many wait."""
        while self._waiting and (
            self._waiting[0].until <= now or len(self._waiting) > _MAX_WAITING
        ):
            yield self._pop()

    def flush(self) -> Iterator[Folded[Source]]:
        """Yield all waiting lines."""
        while self._waiting:
            yield self._pop()

    def _pop(self) -> Folded[Source]:
        line = self._waiting.popleft()
        key = (line.kind, line.text)
        places = self._places[key]
        places.pop(0)
        if not places:
            del self._places[key]
        self._first += 1
        return line
