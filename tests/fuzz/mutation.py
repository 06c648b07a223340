"""Hostile variants of valid JSON and bytes."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

Target = tuple[str, Callable[[Random], bytes], Callable[[bytes], None]]
"""A name, a generator of inputs, and a function that takes an input. The function catches
documented errors itself, so any exception is a failure."""

FRAGMENTS = [
    *[b"null", b"true", b"false", b"-1", b"0", b"1", b"2", b"1.5", b"1e-320", b"1e308"],
    *[b"1e999", b"NaN", b"-Infinity", b"9" * 400, b"1" * 5000, b"18446744073709551616"],
    *[b'""', b'"\\ud800"', b'"\\u0000"', b'"x\\u001b]0;t\\u0007"', b'"../../etc"', b'"\\n"'],
    *[b'"' + b"x" * 2000 + b'"', b'"' + b"x" * 70_000 + b'"', b'"worker"', b'"error"', b'"1.2.3"'],
    *[b"[]", b"{}", b"[[]]", b"[null]", b'{"error": "no"}', b'{"error": 3}', b'{"a": {"b": []}}'],
    *[b"[" * 40 + b"]" * 40, b"[" * 3000, b'{"a":' * 2000, b"[" + b"0," * 5000 + b"0]", b"x", b'"'],
]
_MARK = "\x00mark"


def mutated(random: Random, value: Any) -> bytes:
    """The JSON of ``value`` with a few wrong, missing or swapped fields."""
    value = [copy.deepcopy(value)]
    fragments = []
    for _ in range(random.choice((0, 1, 1, 1, 2, 4))):
        places = list(_places(value))
        holder, key = random.choice(places)
        match random.randrange(10):
            case 0 if isinstance(holder, dict):
                del holder[key]
            case 1:
                other, name = random.choice(places)
                holder[key] = copy.deepcopy(other[name])
            case 2 if isinstance(holder, dict):
                holder[random.choice(("x" * 300, "error", "\ud800", ""))] = holder.pop(key)
            case 3 | 4 | 5 | 6:
                holder[key] = _alike(random, holder[key])
            case _:
                fragments.append(random.choice(FRAGMENTS))
                holder[key] = f"{_MARK}{len(fragments)}"
    text = json.dumps(value[0]).encode()
    for number, fragment in enumerate(fragments, 1):
        text = text.replace(json.dumps(f"{_MARK}{number}").encode(), fragment)
    return text


def _alike(random: Random, value: Any) -> Any:
    """Another value of the same type, which a decoder may accept."""
    match value:
        case bool():
            return not value
        case int():
            return random.choice((0, 1, 2, 64, 29500, 2**31 - 1))
        case float():
            return random.choice((0.0, 1e-9, 1.0, 1.7e9))
        case str():
            return random.choice(("", "x", "error", "1.2.3", "10.0.0.8", "down", "Yes", "bad"))
        case list():
            return random.choice((value * 2, value[:-1], []))
        case _:
            return None


def damaged(random: Random, data: bytes) -> bytes:
    """``data``, sometimes with a few bytes removed, repeated or overwritten."""
    for _ in range(random.choice((0, 0, 0, 1, 2))):
        at = random.randrange(len(data) + 1)
        end = min(len(data), at + random.choice((0, 1, 4, 50)))
        piece = random.choice((b"", data[at:end] * 2, random.randbytes(3), b"\x00", b"\xff" * 20))
        data = data[:at] + piece + data[end:]
    return data


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each list or dict in ``value`` with each of its indices or keys."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, one in list(pairs):
        yield value, key
        if isinstance(one, dict | list):
            yield from _places(one)
