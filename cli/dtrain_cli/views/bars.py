"""Progress bars in a pipe: what a stream shows of a line that does not end. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

from dtrain.records import dataclass

_Source = TypeVar("_Source", bound=Hashable)

BETWEEN_BARS = 30.0
"""Seconds between two lines about the same bar."""


@dataclass(slots=True)
class _Bar:
    until: float
    text: str
    shown: str = ""


class Bars(Generic[_Source]):
    """Says every ``between`` seconds what each unfinished line shows, if that has changed."""

    def __init__(self, between: float = BETWEEN_BARS) -> None:
        self._between = between
        self._bars: dict[_Source, _Bar] = {}  # The one that is due first is the first.

    def __bool__(self) -> bool:
        """Whether there is an unfinished line."""
        return bool(self._bars)

    def update(self, now: float, source: _Source, partial: str, *, ended: bool) -> None:
        """``partial``: what the last line shows; ``ended``: whether lines before it have ended."""
        if ended or not partial:
            self._bars.pop(source, None)
        if bar := self._bars.get(source):
            bar.text = partial
        elif partial:
            self._bars[source] = _Bar(now + self._between, partial)

    @property
    def due(self) -> float | None:
        """When `take` next has something; None without bars."""
        return next((bar.until for bar in self._bars.values()), None)

    def take(self, now: float) -> Iterator[tuple[_Source, str]]:
        """The bars to show now."""
        while (due := self.due) is not None and due <= now:
            source = next(iter(self._bars))
            bar = self._bars.pop(source)
            if bar.text != bar.shown:
                yield source, bar.text
            self._bars[source] = _Bar(now + self._between, bar.text, bar.text)
