"""Decodes JSON from an untrusted program into values of declared types. Pure.

A type is a dataclass, a TypedDict, an Enum, or built from ``str``, ``int``, ``float``, ``bool``,
``Literal``, ``tuple``, ``frozenset``, ``dict``, ``Mapping`` and unions. ``Annotated`` narrows it
with `Range`, `Length` or a compiled pattern, or declares a dataclass as `AsList`. Fields of a
TypedDict may be `NotRequired`. Undeclared fields are ignored. The cost is linear in the size of the
input.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from itertools import accumulate, repeat
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NoReturn,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from dtrain.diagnostics import AnswerError
from dtrain.records import dataclass

if sys.version_info >= (3, 11):
    from typing import NotRequired as NotRequired
    from typing import Required as Required
else:
    from typing_extensions import NotRequired as NotRequired
    from typing_extensions import Required as Required

MAX_DEPTH = 32
"""Levels of lists and objects."""
MAX_DIGITS = 40
_AS_ZEROS = bytes.maketrans(b"123456789", b"0" * 9)
_LONG = b"0" * (MAX_DIGITS + 1)
MAX_TEXT = 1 << 18
"""Characters of a string, unless its type has another limit."""
MAX_ITEMS = 1 << 17
"""Items of a list or an object, unless its type has another limit."""
EXCERPT = 60
"""Characters of an invalid value that an error quotes."""

_BRACKETS = bytes.maketrans(b"[{]}", b"\1\1\0\0")
_OTHERS = bytes(set(range(256)) - set(b"[{]}"))

_T = TypeVar("_T")
_Reader = Callable[[Any, str], Any]


class ProtocolError(Exception):
    """A program on a host sent something that dtrain's programs never send."""


@contextmanager
def answer_of(host: str, attempted: str) -> Iterator[None]:
    """The block reads what ``host`` has sent. Raises AnswerError for its ProtocolError."""
    try:
        yield
    except ProtocolError as error:
        raise AnswerError(host, attempted, error) from None


@dataclass(frozen=True, slots=True)
class Range:
    """Bounds of a number, inclusive and finite."""

    least: float
    most: float


ANY_NUMBER = Range(-math.inf, math.inf)
"""No bounds: a ``float`` may be infinite or NaN, too."""


@dataclass(frozen=True, slots=True)
class Length:
    """Maximum characters of a string, or items of a list or an object."""

    most: int


class AsList:
    """A dataclass that is sent as a list of its fields, which is shorter than an object."""


def parse(data: bytes) -> Any:
    """The JSON value in ``data``. The caller limits its size.

    Raises ProtocolError for anything else, for values nested deeper than `MAX_DEPTH`, and for
    numbers of more than `MAX_DIGITS` digits.
    """
    # json.loads recurses. Its depth limit depends on the Python version and the caller.
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH and _depth(data) > MAX_DEPTH:
        raise ProtocolError(f"JSON nested deeper than {MAX_DEPTH} levels")
    try:
        text = data.decode()
        # A hook for each number takes half the time: only a value that may need it gets one.
        long = _LONG in data.translate(_AS_ZEROS)
        return json.loads(text, parse_int=_integer) if long else json.loads(text)
    except ValueError as error:
        raise ProtocolError(f"not JSON: {excerpt(str(error))}") from None


def parse_object(data: bytes) -> dict[str, Any]:
    """The JSON object in ``data``. Raises ProtocolError as `parse` does."""
    value = parse(data)
    if type(value) is not dict:
        raise ProtocolError(f"expected an object, got {excerpt(value)}")
    return value


def decode(kind: Callable[..., _T], value: Any, where: str) -> _T:
    """Convert ``value``, a result of `parse`, to a ``kind``. Errors call it ``where``.

    Raises ProtocolError.
    """
    return cast(_T, _reader(kind)(value, where))


def decode_named(
    kinds: Mapping[str, Callable[..., _T]], body: Any, what: str, key: str = "type"
) -> _T:
    """Convert ``body`` to the kind that it names at ``key``. Errors call it a ``what``.

    Raises ProtocolError.
    """
    name = body.get(key) if isinstance(body, dict) else None
    if not isinstance(name, str) or name not in kinds:
        raise ProtocolError(f"unknown {what} {excerpt(name)}")
    return decode(kinds[name], body, name)


def excerpt(value: Any) -> str:
    """The start of a value for an error message, on one line."""
    # Only the start: a hostile value may be large.
    match value:
        case str():
            text = value[: EXCERPT + 1]
        case bytes():
            text = ascii(value[: EXCERPT + 1])
        case dict():
            text = "an object"
        case list():
            text = "a list"
        case _:
            text = json.dumps(value)
    text = text if text.isprintable() else ascii(text)
    return text if len(text) <= EXCERPT else f"{text[:EXCERPT]}…"


def _depth(data: bytes) -> int:
    unescaped = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    outside_strings = b"".join(unescaped.split(b'"')[::2])
    brackets = outside_strings.translate(_BRACKETS, _OTHERS)
    return max(accumulate(1 if one else -1 for one in brackets), default=0)


def _integer(digits: str) -> int:
    # int() takes quadratic time. Newer versions of Python refuse long numbers themselves.
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _wrong(where: str, expected: str, value: Any) -> NoReturn:
    got = repr(excerpt(value)) if isinstance(value, str) else excerpt(value)
    raise ProtocolError(f"{where}: expected {expected}, got {got}")


@cache
def _reader(kind: Any) -> _Reader:
    """The function that checks values of one type."""
    limit: Any = None
    if get_origin(kind) is Annotated:
        kind, limit = get_args(kind)
    origin, of = get_origin(kind), get_args(kind)
    if kind is Any:
        return lambda value, where: value
    if kind is bool:
        return _bool
    if kind in (int, float):
        return _number(kind, limit)
    if kind is str:
        return _string(limit)
    if origin in (Required, NotRequired):
        return _reader(of[0])
    if origin is Literal:
        return _choice(of)
    if origin in (Union, UnionType):
        return _any_of([_reader(one) for one in of if one is not NoneType], NoneType in of)
    most = limit.most if isinstance(limit, Length) else MAX_ITEMS
    if origin is tuple:
        return _list(of, most)
    if origin is frozenset:
        items = _list((of[0], ...), most)
        return lambda value, where: frozenset(items(value, where))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _member(kind)
    if origin in (dict, Mapping):
        return _mapping(_reader(of[0]), _reader(of[1]), most)
    if limit is AsList:
        return _row(kind)
    if is_typeddict(kind) or is_dataclass(kind):
        return _record(kind)
    raise TypeError(f"no way to decode {kind}")


def _bool(value: Any, where: str) -> bool:
    return value if type(value) is bool else _wrong(where, "true or false", value)


_BOUNDS = {int: Range(-(1 << 63), (1 << 64) - 1), float: Range(-1e300, 1e300)}


def _number(kind: type[int] | type[float], limit: Range | None) -> _Reader:
    bounds = _BOUNDS[kind] if limit in (None, ANY_NUMBER) else limit
    expected = "an integer" if kind is int else "a number"
    least, most = bounds.least, bounds.most

    def read(value: Any, where: str) -> float:
        if limit == ANY_NUMBER and type(value) is float:
            return value
        if type(value) is not kind and type(value) is not int:
            _wrong(where, expected, value)
        # False for NaN, too.
        if not least <= value <= most:
            _wrong(where, f"{expected} from {least} to {most}", value)
        return kind(value)

    return read


def _string(limit: Length | re.Pattern[str] | None) -> _Reader:
    most = limit.most if isinstance(limit, Length) else MAX_TEXT
    pattern = limit if isinstance(limit, re.Pattern) else None

    def read(value: Any, where: str) -> str:
        if type(value) is not str:
            _wrong(where, "a string", value)
        if len(value) > most:
            _wrong(where, f"at most {most} characters", value)
        if pattern is not None and not pattern.fullmatch(value):
            _wrong(where, f"text that matches {pattern.pattern}", value)
        return value

    return read


def _choice(options: tuple[Any, ...]) -> _Reader:
    expected = "one of " + ", ".join(map(repr, options))

    def read(value: Any, where: str) -> Any:
        return value if type(value) is str and value in options else _wrong(where, expected, value)

    return read


def _member(kind: type[Enum]) -> _Reader:
    members = {one.value: one for one in kind}
    expected = "one of " + ", ".join(map(str, members))

    def read(value: Any, where: str) -> Enum:
        known = type(value) in (str, int) and value in members
        return members[value] if known else _wrong(where, expected, value)

    return read


def _any_of(readers: list[_Reader], or_null: bool) -> _Reader:
    *others, last = readers
    if or_null and not others:
        return lambda value, where: None if value is None else last(value, where)

    def read(value: Any, where: str) -> Any:
        if or_null and value is None:
            return None
        for other in others:
            try:
                return other(value, where)
            except ProtocolError:
                continue
        return last(value, where)

    return read


def _list(of: tuple[Any, ...], most: int) -> _Reader:
    """``tuple[X, ...]`` is a list of any length, ``tuple[X, Y]`` one of two items."""
    every = of[1:] == (Ellipsis,)
    numbers = [] if every else [*filter(None, map(_plain_number, of))]
    if numbers and len(numbers) == len(of):
        return _numbers(numbers, _items(of, most))
    return _items(of, most)


def _plain_number(kind: Any) -> tuple[frozenset[type], float, float] | None:
    """The JSON types and the bounds of a number that may be null; None for another type."""
    null: frozenset[type] = frozenset()
    if get_origin(kind) in (Union, UnionType) and get_args(kind)[1:] == (NoneType,):
        kind, null = get_args(kind)[0], frozenset({NoneType})
    kind, limit = get_args(kind) if get_origin(kind) is Annotated else (kind, None)
    if kind not in _BOUNDS:
        return None
    bounds = limit or _BOUNDS[kind]
    return null | {kind}, bounds.least, bounds.most


def _numbers(limits: list[tuple[frozenset[type], float, float]], other: _Reader) -> _Reader:
    """A list of numbers that need no conversion, as in telemetry. A loop takes a third of
    the time of a call for each. ``other`` reads all that is not such a list."""

    def read(value: Any, where: str) -> Any:
        if type(value) is not list or len(value) != len(limits):
            return other(value, where)
        for one, (kinds, least, most) in zip(value, limits, strict=True):
            if type(one) not in kinds or (one is not None and not least <= one <= most):
                return other(value, where)
        return tuple(value)

    return read


def _items(of: tuple[Any, ...], most: int) -> _Reader:
    every = of[1:] == (Ellipsis,)
    readers = [_reader(one) for one in (of[:1] if every else of)]

    def read(value: Any, where: str) -> tuple[Any, ...]:
        if type(value) is not list:
            _wrong(where, "a list", value)
        if every and len(value) > most:
            raise ProtocolError(f"{where}: expected at most {most} items, got {len(value)}")
        if not every and len(value) != len(readers):
            raise ProtocolError(f"{where}: expected {len(readers)} items, got {len(value)}")
        pairs = zip(repeat(readers[0]) if every else readers, value, strict=False)
        try:
            return tuple([reader(one, where) for reader, one in pairs])
        except ProtocolError:
            # Only an error needs the place of each item, which takes a third of the time.
            pairs = zip(repeat(readers[0]) if every else readers, value, strict=False)
            return tuple([reader(one, f"{where}[{at}]") for at, (reader, one) in enumerate(pairs)])

    return read


def _mapping(key: _Reader, item: _Reader, most: int) -> _Reader:
    def read(value: Any, where: str) -> dict[Any, Any]:
        if type(value) is not dict:
            _wrong(where, "an object", value)
        if len(value) > most:
            raise ProtocolError(f"{where}: expected at most {most} items, got {len(value)}")
        try:
            return {key(name, where): item(one, where) for name, one in value.items()}
        except ProtocolError:  # as in `_list`
            return {
                key(name, f"a key of {where}"): item(one, f"{where}.{excerpt(name)}")
                for name, one in value.items()
            }

    return read


def _row(kind: Any) -> _Reader:
    hints = get_type_hints(kind, include_extras=True)
    items = _list(tuple(hints[one.name] for one in fields(kind)), MAX_ITEMS)
    return lambda value, where: kind(*items(value, where))


def _record(kind: Any) -> _Reader:
    hints = get_type_hints(kind, include_extras=True)
    make: Callable[..., Any]
    if is_typeddict(kind):
        make = dict
        readers = {name: _reader(hint) for name, hint in hints.items()}
        # As the hints are texts, Python itself does not see what is marked in them.
        marks = {name: get_origin(hint) for name, hint in hints.items()}
        required = kind.__required_keys__ - {n for n in marks if marks[n] is NotRequired}
        required |= {name for name in marks if marks[name] is Required}
    else:
        make = kind
        readers = {one.name: _reader(hints[one.name]) for one in fields(kind)}
        required = {
            one.name
            for one in fields(kind)
            if one.default is MISSING and one.default_factory is MISSING
        }

    def read(value: Any, where: str) -> Any:
        if type(value) is not dict:
            _wrong(where, "an object", value)
        found = {}
        for name, reader in readers.items():
            if name in value:
                found[name] = reader(value[name], f"{where}.{name}")
            elif name in required:
                raise ProtocolError(f"{where}: {name} is missing")
        return make(**found)

    return read
