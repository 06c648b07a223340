"""Answers of the receiver of the working folder, see `dtrain.node.sync`. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated

from dtrain.messages.decode import Length, ProtocolError, Range, decode_named, parse_object
from dtrain.records import dataclass

_Number = Annotated[int, Range(0, (1 << 32) - 1)]
"""The index of a file in the announced tree."""


@dataclass(frozen=True, slots=True)
class Want:
    """The files to send, in this order."""

    indices: Annotated[tuple[_Number, ...], Length(1 << 32)]


@dataclass(frozen=True, slots=True)
class Done:
    path: Annotated[str, re.compile(r"/[^\0]{0,8191}")]
    notices: Annotated[tuple[str, ...], Length(100)]


@dataclass(frozen=True, slots=True)
class SyncRefused:
    reason: str
    hint: str = ""
    changed: _Number | None = None
    """A file whose content differs from the tree's hash."""


_Answer = Want | Done | SyncRefused
_ANSWERS: dict[str, Callable[..., _Answer]] = {"want": Want, "done": Done, "refused": SyncRefused}


def max_answer(files: int) -> int:
    """Maximum size of an answer about a tree with ``files`` files, in bytes."""
    return (1 << 20) + 16 * files


def read_answer(data: bytes, files: int) -> _Answer:
    """An answer about a tree with ``files`` files. Raises ProtocolError."""
    body = parse_object(data)
    answer = decode_named(_ANSWERS, body, "answer")
    match answer:
        case Want(indices):
            named: tuple[int, ...] = indices
            if len(set(indices)) < len(indices):
                raise ProtocolError("want: a file is listed twice")
        case SyncRefused(changed=int() as changed):
            named = (changed,)
        case _:
            named = ()
    if any(index >= files for index in named):
        raise ProtocolError(f"{body['type']}: there is no file {max(named)}; the tree has {files}")
    return answer
