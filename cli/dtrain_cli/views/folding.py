"""Identical lines from several ranks as one line (``--fold``). Pure: ``now`` is an argument."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Hashable, Iterator
from itertools import groupby
from operator import itemgetter
from typing import Generic, TypeVar

from dtrain.records import dataclass

_Source = TypeVar("_Source", bound=Hashable)

WINDOW = 0.2
"""Seconds that a line waits for the same line from other ranks."""
_MAX_WAITING = 512 << 10
"""Characters that wait at most."""
_CHUNK = 64 << 10
"""Characters of a chunk. One call searches a chunk; a new line copies at most one."""
_FIRST_STEP = 128
"""Characters that are compared first. Each step is twice as long as the one before it, so that the
last comparison, which fails, costs no more than the others."""


@dataclass(slots=True)
class Folded(Generic[_Source]):
    """Consecutive lines, and the sources that each wrote all of them."""

    text: str
    """Each line with its newline."""
    kind: str
    sources: list[_Source]
    """In the order in which they wrote."""


class LineFolder(Generic[_Source]):
    """Holds each line for a short time and joins equal lines.

    Returns each line exactly once for each rank that wrote it, and keeps the order of each rank's
    lines, of one ``kind`` and of all kinds.

    The waiting lines form one long text, in the order of output. A place in it counts the
    characters from the first line that was ever added. For much output, searching and comparing
    text takes a small part of the time that a table of all lines would take.
    """

    def __init__(self, window: float = WINDOW) -> None:
        self._window = window
        self._first = self._end = 0
        """The places where the first waiting line begins, and where the last one ends."""
        self._chunks: list[str] = []
        """The text, in pieces of whole lines. Each has a newline before its first line."""
        self._chunk_begins: list[int] = []
        self._origins: list[tuple[str, list[_Source]]] = []
        """Kind and sources of consecutive lines. Neighbors may share a list, so none is changed."""
        self._origin_begins: list[int] = []
        self._batches: deque[tuple[float, int]] = deque()
        """Time by which the lines before a place must be printed."""
        self._last: dict[_Source, int] = {}
        """The place where each source's last line ends."""

    @property
    def due(self) -> float | None:
        """Time by which the next line must be printed; None if no line waits."""
        return self._batches[0][0] if self._batches else None

    def add(self, now: float, source: _Source, kind: str, text: str) -> None:
        """``text``: whole lines, each with its newline."""
        done, last = 0, self._last.get(source, 0)
        while done < len(text):
            line = text[done : text.index("\n", done) + 1]
            # Only a place after this source's last line keeps the order of its lines.
            place = self._find(line, kind, max(last, self._first))
            if place is None:
                break
            end = self._equal(place, kind, text, done)
            self._share(source, place, end)
            done += end - place
            last = end
        if done < len(text):
            # The lines after it must come after it as well.
            self._append(text[done:], kind, source)
            self._batches.append((now + self._window, self._end))
            last = self._end
        self._last[source] = last

    def take(self, now: float = math.inf) -> list[Folded[_Source]]:
        """The lines that have waited long enough, and the oldest if too many wait; by default, all
        lines."""
        end = self._first
        while self._batches and (self._batches[0][0] <= now or self._end - end > _MAX_WAITING):
            end = self._batches.popleft()[1]
        return self._release(end)

    def _find(self, line: str, kind: str, after: int) -> int | None:
        """The first place of a line from ``after`` on."""
        wanted = "\n" + line
        for number in range(max(0, bisect_right(self._chunk_begins, after) - 1), len(self._chunks)):
            chunk, begin = self._chunks[number], self._chunk_begins[number]
            while (at := chunk.find(wanted, max(0, after - begin))) >= 0:
                after = self._next_of(kind, begin + at)
                if after == begin + at:
                    return after
        return None

    def _next_of(self, kind: str, place: int) -> int:
        """The first place from ``place`` on with a line of this kind."""
        for number in range(self._origin_at(place), len(self._origins)):
            if self._origins[number][0] == kind:
                return max(place, self._origin_begins[number])
        return self._end

    def _equal(self, place: int, kind: str, text: str, done: int) -> int:
        """The end of the waiting lines that equal those of ``text`` from ``done`` on. The first
        ones are known to be equal."""
        size, step = text.index("\n", done) + 1 - done, _FIRST_STEP
        while piece := self._piece(place + size, kind, min(step, len(text) - done - size)):
            start = done + size
            if not text.startswith(piece, start):
                size += _common(piece, text[start : start + len(piece)])
                break
            size += len(piece)
            step *= 2
        return place + text.rfind("\n", done, done + size) + 1 - done

    def _piece(self, begin: int, kind: str, most: int) -> str:
        """Waiting text of one kind: at most ``most`` characters, of one chunk."""
        end = min(self._end, begin + most)
        for number in range(self._origin_at(begin), len(self._origins)):
            if self._origin_begins[number] >= end:
                break
            if self._origins[number][0] != kind:
                end = self._origin_begins[number]
        return next(self._slices(begin, end), "")

    def _share(self, source: _Source, begin: int, end: int) -> None:
        """Add a source to waiting lines."""
        for number in range(self._cut(begin), self._cut(end)):
            kind, sources = self._origins[number]
            self._origins[number] = kind, [*sources, source]

    def _cut(self, place: int) -> int:
        """The number of the origin that begins at ``place``, which may be the end."""
        number = bisect_left(self._origin_begins, place)
        if place < self._end and self._origin_begins[number : number + 1] != [place]:
            self._origin_begins.insert(number, place)
            self._origins.insert(number, self._origins[number - 1])
        return number

    def _origin_at(self, place: int) -> int:
        return bisect_right(self._origin_begins, place) - 1

    def _append(self, text: str, kind: str, source: _Source) -> None:
        if self._chunks and len(self._chunks[-1]) + len(text) <= _CHUNK:
            self._chunks[-1] += text
        else:
            self._chunks.append("\n" + text)
            self._chunk_begins.append(self._end)
        self._origins.append((kind, [source]))
        self._origin_begins.append(self._end)
        self._end += len(text)

    def _slices(self, begin: int, end: int) -> Iterator[str]:
        """The waiting text between two places, in pieces."""
        number = bisect_right(self._chunk_begins, begin) - 1
        while begin < end:
            at = begin - self._chunk_begins[number] + 1
            piece = self._chunks[number][at : at + end - begin]
            yield piece
            begin += len(piece)
            number += 1

    def _release(self, end: int) -> list[Folded[_Source]]:
        if end == self._first:
            return []
        released = self._cut(end)
        ends = [*self._origin_begins[1:released], end]
        groups: list[Folded[_Source]] = []
        runs = zip(self._origins[:released], ends, strict=True)
        for (kind, sources), same in groupby(runs, itemgetter(0)):
            *_, (_, until) = same
            text = "".join(self._slices(self._first, until))
            groups.append(Folded(text, kind, sources))
            self._first = until
        del self._origins[:released], self._origin_begins[:released]
        gone = len(self._chunks) if end == self._end else bisect_right(self._chunk_begins, end) - 1
        del self._chunks[:gone], self._chunk_begins[:gone]
        return groups


def _common(one: str, other: str) -> int:
    """The length of the longest common beginning."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one.startswith(other[:middle]):
            low = middle
        else:
            high = middle - 1
    return low
