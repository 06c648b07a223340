"""Collect the problems of one cluster file, so that one pass reports all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from itertools import islice

from dtrain.diagnostics import Position, Problem, SpecError
from dtrain.records import dataclass

MAX_PROBLEMS = 500
"""Further problems are dropped: the file is probably not a cluster file."""
MAX_QUOTED = 60
SETTINGS = "--set"
"""The name in positions of the settings of a command line."""


@dataclass(frozen=True, slots=True)
class TextSpan:
    """A position in the text: line and column from 1, width in characters."""

    line: int
    column: int
    width: int = 1


class Problems:
    """The problems of one file and of the settings that change it, in file order.

    The lines below those of the file are the ``settings``.
    """

    def __init__(self, file: str, lines: Sequence[str], settings: Iterable[str] = ()) -> None:
        self._file = file
        self._length = len(lines)
        self.lines = [*lines, *settings]
        self._found: dict[tuple[TextSpan, str], Problem] = {}
        self.homes: Mapping[str, Sequence[str]] = {}
        """The sections that each key of the format belongs in, for hints about misplaced keys."""
        self.settings: set[str] = set()
        """The full keys that settings give or remove."""

    @property
    def full(self) -> bool:
        return len(self._found) >= MAX_PROBLEMS

    def add(self, message: str, place: TextSpan, hint: str = "") -> None:
        if not self.full:
            # A value that aliases share is read several times.
            self._found.setdefault(
                (place, message),
                Problem(
                    message,
                    self.position(place),
                    self.lines[place.line - 1] if place.line <= len(self.lines) else "",
                    place.width,
                    hint,
                ),
            )

    def add_repeated(self, message: str, place: TextSpan, first: TextSpan) -> None:
        """Add a problem about something that is in the file twice."""
        elsewhere = f"; the first is {self.where(first)}" if first.line != place.line else ""
        self.add(message, place, f"keep one{elsewhere}")

    def is_setting(self, place: TextSpan) -> bool:
        return place.line > self._length

    def position(self, place: TextSpan) -> Position:
        if self.is_setting(place):
            return Position(SETTINGS, place.line - self._length, place.column)
        return Position(self._file, place.line, place.column)

    def where(self, place: TextSpan) -> str:
        """The line of another place, for a message."""
        at = self.position(place)
        return f"in {at}" if self.is_setting(place) else f"on line {at.line}"

    def fresh(self) -> Problems:
        """An empty collection for the same file."""
        return Problems(self._file, self.lines[: self._length], self.lines[self._length :])

    @property
    def found(self) -> tuple[Problem, ...]:
        """Every problem so far, in file order."""
        ordered = sorted(self._found, key=lambda key: (key[0].line, key[0].column))
        return tuple(self._found[key] for key in ordered)

    def raise_if_any(self) -> None:
        """Raise SpecError if a problem was added."""
        if self._found:
            raise self.error()

    def error(self) -> SpecError:
        """The SpecError with every problem added so far, in file order."""
        return SpecError(self.found)


def shown(text: str) -> str:
    """Quote text from the file for a message: one line, safe on a terminal, at most `MAX_QUOTED`
    characters."""
    if len(text) > MAX_QUOTED:
        text = text[: MAX_QUOTED - 1] + "…"
    return "'" + "".join(map(visible, text)) + "'"


def visible(character: str) -> str:
    """A character as it can be printed; control and invisible characters as an escape."""
    if character.isprintable():
        return character
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:
        # Python's surrogateescape for a byte that is not UTF-8.
        return f"\\x{code - 0xDC00:02x}"
    if character in _SHORT:
        return _SHORT[character]
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


_SHORT = {"\n": r"\n", "\t": r"\t", "\r": r"\r", "\0": r"\0"}


def nearest(text: str, known: Iterable[str]) -> str | None:
    """The name in ``known`` that ``text`` most likely means; None if no name is close."""
    if len(text) > 64:
        return None
    # Each comparison is slow, and there may be thousands of hosts.
    names = {name.lower(): name for name in islice(known, 1000)}
    lower = text.lower()
    close = get_close_matches(lower.replace("-", "_"), names, n=1, cutoff=0.6)
    close = close or get_close_matches(lower, names, n=1, cutoff=0.6)
    return names[close[0]] if close else None
