"""Host lists: ``gpu[01-08,11],login`` expands to ten host names.

A list consists of items separated by commas. An item is text with any number of brackets that
contain numbers and ranges. The rightmost bracket varies fastest: ``r[1-2]n[1-2]`` is r1n1, r1n2,
r2n1, r2n2. Leading zeros are kept: ``[08-10]`` is 08, 09, 10.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, product

from dtrain.records import dataclass

MAX_HOSTS = 16384
MAX_NAME = 253
"""Longest host name that DNS allows, in characters."""

_BRIEF = 300
"""Most characters of a list in a message."""
_FIRST = 4
_DIGITS = 18
_PART = re.compile(r"\[([^]]*)\]|[^\[]+")
"""What is in brackets, or text without any."""
_RANGE = re.compile(r"\s*([0-9]+)\s*(?:-\s*([0-9]+)\s*)?")
_NUMBER = re.compile(r"([0-9]+)")


class HostListError(ValueError):
    """A host list that cannot be read. ``offset`` counts characters from 0, over ``width``."""

    def __init__(self, message: str, offset: int, width: int = 1, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.offset = offset
        self.width = width
        self.hint = hint


@dataclass(frozen=True, slots=True)
class _Range:
    low: int
    high: int
    digits: int
    """Width of a number with leading zeros."""

    def __len__(self) -> int:
        return self.high - self.low + 1

    def numbers(self) -> Iterable[str]:
        return (f"{number:0{self.digits}d}" for number in range(self.low, self.high + 1))


def unfold(text: str, *, limit: int = MAX_HOSTS) -> tuple[str, ...]:
    """The names in ``text``, in order, with repetitions; never empty.

    Raises HostListError if ``text`` is malformed or expands to more than ``limit`` names (checked
    before expansion).
    """
    names: list[str] = []
    room = limit
    for start, end in _items(text):
        parts = _parts(text, start, end)
        count = 1
        length = 0
        for part in parts:
            if isinstance(part, str):
                length += len(part)
            else:
                count *= sum(len(numbers) for numbers in part)
                length += max(len(str(numbers.high)) for numbers in part)
        if count > room:
            raise HostListError(f"the list has more than {limit} hosts", start, end - start)
        if length > MAX_NAME:
            raise HostListError(
                f"a host name has at most {MAX_NAME} characters; this has {length}",
                start,
                end - start,
            )
        room -= count
        choices = [
            (part,)
            if isinstance(part, str)
            else tuple(number for numbers in part for number in numbers.numbers())
            for part in parts
        ]
        names.extend("".join(choice) for choice in product(*choices))
    return tuple(names)


_Item = tuple[tuple[str, ...], ...]
"""Literals at even positions and numbers at odd ones, each as the choices that occur there."""


def fold(names: Iterable[str]) -> str:
    """A short list of ``names`` that keeps order and repetitions.

    ``unfold(fold(names)) == tuple(names)`` for names without brackets, commas and spaces.
    It combines only neighbors, so sort the names first if their order does not matter.
    """
    items: list[_Item] = [tuple((part,) for part in _split_numbers(name)) for name in names]
    longest = max(map(len, items), default=0)
    for position in range(longest - 2, 0, -2):
        items = list(_merged(items, position))
    return ",".join("".join(map(_text, item)) for item in items)


def brief(names: Iterable[str]) -> str:
    """`fold` for a message: of a list that stays long, the first names and how many follow."""
    names = tuple(names)
    folded, others = fold(names), len(names) - _FIRST
    if len(folded) <= _BRIEF or others <= 0:
        return folded
    return f"{fold(names[:_FIRST])} and {others:,} more"


def in_order(names: Iterable[str]) -> tuple[str, ...]:
    """The different ``names``, sorted with numbers by their value: n2 comes before n10."""
    return tuple(sorted({*names}, key=_sort_key))


def _sort_key(name: str) -> tuple[list[str], list[tuple[int, str]]]:
    parts = _split_numbers(name)
    return parts[::2], [(int(number), number) for number in parts[1::2]]


def _items(text: str) -> Iterable[tuple[int, int]]:
    """Start and end of each comma-separated item, without the blanks around it."""
    opened: int | None = None
    start = 0
    for offset, character in enumerate(text + ","):
        if character == "[":
            if opened is not None:
                raise HostListError("brackets cannot be nested", offset)
            opened = offset
        elif character == "]":
            if opened is None:
                raise HostListError("']' without a '[' before it", offset)
            opened = None
        elif character == "," and (opened is None or offset == len(text)):
            if opened is not None:
                raise HostListError("'[' without a ']' after it", opened)
            item = text[start:offset]
            if not item.strip():
                raise HostListError(
                    "a host name is missing here", min(start, max(len(text) - 1, 0))
                )
            yield start + len(item) - len(item.lstrip()), start + len(item.rstrip())
            start = offset + 1


def _parts(text: str, start: int, end: int) -> list[str | list[_Range]]:
    parts: list[str | list[_Range]] = []
    for part in _PART.finditer(text, start, end):
        if part[1] is not None:
            parts.append(_ranges(part[1], part.start(1)))
            continue
        if blank := re.search(r"\s", part[0]):
            raise HostListError(
                "a host name cannot contain spaces",
                part.start() + blank.start(),
                hint="separate hosts with commas",
            )
        parts.append(part[0])
    return parts


def _ranges(inside: str, start: int) -> list[_Range]:
    """Read ``01-08,11``, which starts at ``start``."""
    ranges = []
    for written in inside.split(","):
        ranges.append(_range(written, start))
        start += len(written) + 1
    return ranges


def _range(written: str, start: int) -> _Range:
    match = _RANGE.fullmatch(written)
    width = max(len(written), 1)
    if not written.strip():
        raise HostListError("a number is missing in the brackets", start, width)
    if not match:
        raise HostListError(
            f"{written.strip()!r} is neither a number nor a range",
            start,
            width,
            hint="write numbers and ranges in brackets, e.g. [01-08,11]",
        )
    low, high = match[1], match[2] or match[1]
    if max(len(low), len(high)) > _DIGITS:
        raise HostListError(f"numbers have at most {_DIGITS} digits", start, width)
    if int(low) > int(high):
        raise HostListError(
            f"the range {low}-{high} runs backwards", start, width, hint=f"write {high}-{low}"
        )
    padded = any(len(bound) > 1 and bound[0] == "0" for bound in (low, high))
    if padded and (len(high) < len(low) or (high[0] == "0" and len(high) != len(low))):
        digits = max(len(low), len(high))
        raise HostListError(
            f"the ends of the range {low}-{high} have different numbers of digits",
            start,
            width,
            hint=f"write {int(low):0{digits}d}-{int(high):0{digits}d}",
        )
    return _Range(int(low), int(high), len(low) if padded else 1)


def _split_numbers(name: str) -> list[str]:
    """Alternate literal and number, starting and ending with a (perhaps empty) literal."""
    if len(name) > MAX_NAME:  # not a host name
        return [name]
    parts = _NUMBER.split(name)
    index = 1
    while index < len(parts):
        if len(parts[index]) > _DIGITS:
            parts[index - 1 : index + 2] = ["".join(parts[index - 1 : index + 2])]
        else:
            index += 2
    return parts


def _merged(items: Iterable[_Item], position: int) -> Iterator[_Item]:
    """Combine neighbors that differ only in the number at ``position``."""
    for (before, after), group in groupby(
        items, lambda item: (item[:position], item[position + 1 :])
    ):
        neighbors = list(group)
        if len(neighbors) == 1 or len(neighbors[0]) <= position:
            yield from neighbors
        else:
            choices = tuple(number for item in neighbors for number in item[position])
            yield (*before, choices, *after)


def _text(choices: Sequence[str]) -> str:
    if len(choices) == 1:
        return choices[0]
    runs: list[list[str]] = []
    for number in choices:
        if runs and number == _successor(runs[-1][0], runs[-1][-1]):
            runs[-1].append(number)
        else:
            runs.append([number])
    return "[" + ",".join(run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs) + "]"


def _successor(first: str, last: str) -> str:
    """The number after ``last`` in a range that starts at ``first``."""
    digits = len(first) if first[0] == "0" else 1
    return f"{int(last) + 1:0{digits}d}"
