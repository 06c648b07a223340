"""Identical lines from several ranks as one line (``--fold``). Pure: ``now`` is an argument."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import repeat
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
        self._kinds: list[str] = []
        self._sources: list[list[_Source]] = []
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

    def add(self, now: float, source: _Source, kind: str, lines: Sequence[str]) -> None:
        if not lines:
            return
        places = self._places.setdefault(kind, {})
        begin = self._first + len(self._texts)
        # Most lines are new. Then this takes no loop.
        if places.keys().isdisjoint(lines) and len(set(lines)) == len(lines):
            places.update(zip(lines, range(begin, begin + len(lines)), strict=True))
            self._texts += lines
            self._kinds += repeat(kind, len(lines))
            self._sources += repeat([source], len(lines))
            self._last[source] = begin + len(lines) - 1
        else:
            self._last[source] = self._join(source, kind, lines)
        end = self._first + len(self._texts)
        if end > begin:
            self._batches.append((now + self._window, end))

    def _join(self, source: _Source, kind: str, lines: Sequence[str]) -> int:
        """Join each line with a waiting one or append it. Returns the last line's number."""
        places, first = self._places[kind], self._first
        last = self._last.get(source, -1)
        # Lines share lists of sources, which never change: equal ones are mostly the same.
        more: dict[int, tuple[list[_Source], list[_Source]]] = {}
        own = [source]
        for text in lines:
            number = first + len(self._texts)
            found = places.setdefault(text, number)
            if isinstance(found, list):
                at = found[min(bisect_right(found, last), len(found) - 1)]
            else:
                at = found
            # Only a line after this source's last one, to keep the order of its lines.
            if last < at < number:
                joined = self._sources[at - first]
                if id(joined) not in more:
                    more[id(joined)] = joined, [*joined, source]
                self._sources[at - first] = more[id(joined)][1]
                last = at
                continue
            if isinstance(found, list):
                found.append(number)
            elif at < number:
                places[text] = [at, number]
            self._texts.append(text)
            self._kinds.append(kind)
            self._sources.append(own)
            last = number
        return last

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
        texts, kinds, sources = self._texts[:count], self._kinds[:count], self._sources[:count]
        del self._texts[:count], self._kinds[:count], self._sources[:count]
        self._first += count
        groups: list[Folded[_Source]] = []
        start = 0
        pairs = zip(sources, sources[1:], kinds, kinds[1:], strict=False)
        for at, (one, other, kind, next_kind) in enumerate(pairs, 1):
            if (one is other or one == other) and kind == next_kind:
                continue
            groups.append(Folded(texts[start:at], kinds[start], sources[start]))
            start = at
        if count:
            groups.append(Folded(texts[start:count], kinds[start], sources[start]))
        for group in groups:
            places = self._places[group.kind]
            for text in group.texts:
                found = places.pop(text)
                if found.__class__ is list and len(found) > 1:
                    del found[0]
                    places[text] = found
        return groups
