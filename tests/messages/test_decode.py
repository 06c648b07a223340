"""JSON that is wrong, deep or long is refused. `test_linear.py` shows that it takes linear time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypedDict

import pytest

from dtrain.messages.agent import read_message
from dtrain.messages.decode import (
    AsList,
    Length,
    NotRequired,
    ProtocolError,
    Range,
    Required,
    decode,
    parse,
)
from dtrain.messages.pieces import MAX_NOISE
from dtrain.transport.incoming import Incoming
from support.scripted import ScriptedProcess


@dataclass(frozen=True)
class Item:
    size: Annotated[int, Range(0, 10)]
    name: Annotated[str, Length(5)]
    rates: tuple[float, ...] = ()
    next: dict[str, int] | None = None


def test_a_value_of_every_kind_and_fields_that_are_not_known() -> None:
    said = parse(b'{"size": 3, "name": "abc", "rates": [1, 2.5], "next": {"a": 4}, "more": []}')
    assert decode(Item, said, "item") == Item(3, "abc", (1.0, 2.5), {"a": 4})


class Named(TypedDict):
    size: int
    name: NotRequired[str]


class Sized(TypedDict, total=False):
    size: Required[int]
    name: str


@pytest.mark.parametrize("kind", [Named, Sized])
def test_a_mapping_may_lack_a_field_that_is_not_required(kind: Callable[..., Any]) -> None:
    assert decode(kind, {"size": 3}, "item") == {"size": 3}
    assert decode(kind, {"size": 3, "name": "a"}, "item") == {"size": 3, "name": "a"}
    with pytest.raises(ProtocolError, match="item: size is missing"):
        decode(kind, {"name": "a"}, "item")
    with pytest.raises(ProtocolError, match=r"item\.name: expected a string, got null"):
        decode(kind, {"size": 3, "name": None}, "item")


def test_an_object_that_is_sent_as_a_list() -> None:
    kind = Annotated[Item, AsList]
    assert decode(kind, [3, "abc", [1], None], "item") == Item(3, "abc", (1.0,))
    with pytest.raises(ProtocolError, match=r"item\[0\]: expected an integer from 0 to 10, got 11"):
        decode(kind, [11, "abc", [], None], "item")
    with pytest.raises(ProtocolError, match="item: expected 4 items, got 2"):
        decode(kind, [3, "abc"], "item")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"size": "3"}, r"item\.size: expected an integer, got '3'"),
        ({"size": True}, r"item\.size: expected an integer, got true"),
        ({"size": 3.0}, r"item\.size: expected an integer"),
        ({"size": 11}, r"item\.size: expected an integer from 0 to 10, got 11"),
        ({"name": "abcdef"}, r"item\.name: expected at most 5 characters"),
        ({"name": None}, r"item\.name: expected a string, got null"),
        ({"rates": [1, float("inf")]}, r"item\.rates\[1\]: expected a number"),
        ({"rates": [float("nan")]}, r"item\.rates\[0\]"),
        ({"rates": {}}, r"item\.rates: expected a list, got an object"),
        ({"next": {"a": None}}, r"item\.next\.a: expected an integer, got null"),
        ({"next": {"\x1b" * 400: None}}, r"item\.next\.'\\x1b"),
    ],
)
def test_a_wrong_value_is_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ProtocolError, match=message) as caught:
        decode(Item, {"size": 3, "name": "abc", **wrong}, "item")
    assert len(str(caught.value)) < 300
    with pytest.raises(ProtocolError, match="item: name is missing"):
        decode(Item, {"size": 3}, "item")


def test_brackets_in_strings_are_no_nesting() -> None:
    text = b'["' + b"[" * 500 + rb"\"[\\" + b'"]'
    assert len(parse(text)[0]) == 503


@pytest.mark.parametrize(
    "text",
    [b"[" * 33 + b"]" * 33, b'{"a":' * 99, b'["\\\\", ' + b"[" * 99, b"9" * 41, b"\xff", b"{", b""],
)
def test_what_is_refused(text: bytes) -> None:
    with pytest.raises(ProtocolError):
        parse(text)


def test_endless_noise_ends() -> None:
    with pytest.raises(ProtocolError, match="1 MiB"):
        Incoming(ScriptedProcess(b"x" * (MAX_NOISE + 5000))).preamble(b"\0mark\n")
    with pytest.raises(ProtocolError, match="without an end"):
        Incoming(ScriptedProcess(b"x" * 5000)).until(b"\n", 4000)
    with pytest.raises(EOFError):
        Incoming(ScriptedProcess(b"abc")).until(b"\n", 4000)


@pytest.mark.parametrize(
    "message",
    [
        {"type": "alive", "supervisor": 7, "silent": 1e9},
        {"type": "alive", "supervisor": 1 << 23, "silent": 0.0},
        {"type": "lost", "reason": "", "survivors": [{"pid": 1 << 31, "name": "x"}]},
    ],
)
def test_numbers_that_no_host_has(message: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match=r"expected an? "):
        read_message(message)
