"""Identical lines from several ranks as one line (``--fold``). Pure: ``now`` is an argument."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from itertools import groupby, repeat
from typing import Generic, TypeVar

_Source = TypeVar("_Source", bound=Hashable)

WINDOW = 0.2
"""Seconds that a line waits for the same line from other ranks."""
_MAX_WAITING = 20_000


@dataclass(slots=True)
class Folded(Generic[_Source]):
    """Consecutive lines and the sources that wrote all of them, in order of writing."""

    texts: list[str]
    kind: str
    sources: list[_Source]


class LineFolder(Generic[_Source]):
    """Holds each line for a short time and joins equal lines.

    Returns each line exactly once for each rank that wrote it, and keeps the order of each rank's
    lines, of one ``kind`` and of all kinds.
    """

    def __init__(self, window: float = WINDOW) -> None:
        self._window = window
        # The waiting lines, in the order of output. Line numbers follow it, too.
        self._texts: list[str] = []
        self._origins: list[tuple[str, list[_Source]]] = []
        """Their kinds and sources. Neighbors mostly share one object, which never changes."""
        self._first = 0
        self._places: dict[str, dict[str, int | list[int]]] = {}
        """The numbers of the waiting lines by kind and text."""
        self._batches: deque[tuple[float, int]] = deque()
        """Time by which the lines below a number must be printed."""
        self._last: dict[_Source, int] = {}

    @property
    def due(self) -> float | None:
        """Time by which the next line must be printed; None if no line waits."""
        return self._batches[0][0] if self._batches else None

    def add(self, now: float, source: _Source, kind: str, lines: list[str]) -> None:
        if not lines:
            return
        places = self._places.setdefault(kind, {})
        known, begin = len(places), self._first + len(self._texts)
        own = range(begin, begin + len(lines))
        found = list(map(places.setdefault, lines, own))
        # Most lines are new. Then this takes no loop.
        if found == list(own):
            self._texts += lines
            self._origins += repeat((kind, [source]), len(lines))
            self._last[source] = own[-1]
        else:
            if len(places) > known:
                for text, at, number in zip(lines, found, own, strict=True):
                    if at == number:
                        del places[text]
            self._last[source] = self._join(source, kind, lines)
        end = self._first + len(self._texts)
        if end > begin:
            self._batches.append((now + self._window, end))

    def _join(self, source: _Source, kind: str, lines: list[str]) -> int:
        """Join each line with a waiting one or append it. Returns the last line's number."""
        places, first, own = self._places[kind], self._first, (kind, [source])
        last = self._last.get(source, -1)
        done = 0
        while done < len(lines):
            text, number = lines[done], first + len(self._texts)
            found = places.setdefault(text, number)
            if isinstance(found, list):
                at = found[min(bisect_right(found, last), len(found) - 1)]
            else:
                at = found
            # Only a line after this source's last one, to keep the order of its lines.
            if last < at < number:
                count = self._equal(kind, lines, done, at - first)
                self._share(source, at - first, at - first + count)
                last = at + count - 1
                done += count
                continue
            if isinstance(found, list):
                found.append(number)
            elif at < number:
                places[text] = [at, number]
            self._texts.append(text)
            self._origins.append(own)
            last = number
            done += 1
        return last

    def _equal(self, kind: str, lines: list[str], done: int, at: int) -> int:
        """How many lines from ``done`` on equal the waiting ones from ``at`` on: at least one."""
        count = step = 1
        while more := lines[done + count : done + count + step]:
            begin, end = at + count, at + count + len(more)
            if self._texts[begin:end] != more:
                break
            if any(origin[0] != kind for origin, _ in groupby(self._origins[begin:end])):
                break
            count += len(more)
            step *= 2  # so that the last comparison, which fails, costs no more than the others
        return count

    def _share(self, source: _Source, begin: int, end: int) -> None:
        """Add a source to waiting lines."""
        shared: list[tuple[str, list[_Source]]] = []
        for (kind, sources), run in groupby(self._origins[begin:end]):
            shared += repeat((kind, [*sources, source]), len(list(run)))
        self._origins[begin:end] = shared

    def take(self, now: float) -> list[Folded[_Source]]:
        """The lines that have waited long enough, and the oldest if too many wait."""
        end = self._first + max(0, len(self._texts) - _MAX_WAITING)
        while self._batches and (self._batches[0][0] <= now or self._batches[0][1] <= end):
            end = max(end, self._batches.popleft()[1])
        return self._release(end - self._first)

    def flush(self) -> list[Folded[_Source]]:
        """All waiting lines."""
        self._batches.clear()
        return self._release(len(self._texts))

    def _release(self, count: int) -> list[Folded[_Source]]:
        texts, origins = self._texts[:count], self._origins[:count]
        del self._texts[:count], self._origins[:count]
        self._first += count
        groups: list[Folded[_Source]] = []
        start = 0
        for (kind, sources), run in groupby(origins):
            end = start + len(list(run))
            groups.append(Folded(texts[start:end], kind, sources))
            start = end
        for group in groups:
            self._forget(self._places[group.kind], group.texts)
        return groups

    def _forget(self, places: dict[str, int | list[int]], texts: list[str]) -> None:
        numbers = list(map(places.pop, texts, repeat(None)))
        if list in map(type, numbers):
            for text, found in zip(texts, numbers, strict=True):
                if isinstance(found, list) and (later := found[bisect_left(found, self._first) :]):
                    places[text] = later
