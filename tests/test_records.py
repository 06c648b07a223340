"""Records are dataclasses whose ``__init__`` is compiled when it is first needed."""

from __future__ import annotations

from dataclasses import MISSING, asdict, field, replace
from inspect import signature
from typing import Any

import pytest

from dtrain.records import dataclass


@dataclass(frozen=True, slots=True)
class Base:
    name: str
    parts: list[int] = field(default_factory=list)
    count: int = field(init=False, default=3)
    seen: list[str] = field(init=False, default_factory=list)
    later: str = field(init=False)
    note: str = field(kw_only=True, default="")


@dataclass(frozen=True, slots=True)
class Derived(Base):
    total: int = 0

    def __post_init__(self) -> None:
        self.parts.append(self.total)


@dataclass(frozen=True)
class Signed:
    name: str
    parts: list[int] = field(default_factory=list)
    note: str = field(kw_only=True, default="")


@dataclass(slots=True)
class Own:
    name: str

    def __init__(self) -> None:
        self.name = "own"


@dataclass(frozen=True)
class Empty:
    pass


def test_an_object_is_made_as_by_a_dataclass() -> None:
    made = Derived("a", total=5)
    assert (made.name, made.parts, made.count, made.seen) == ("a", [5], 3, [])
    assert (made.note, made.total) == ("", 5)
    assert not hasattr(made, "later")
    assert Derived("b").parts is not Derived("b").parts
    other = Derived("b", [1], 2, note="n")
    assert (other.parts, other.total, other.note) == ([1, 2], 2, "n")
    assert Base("c").parts == []
    assert replace(Empty()) == Empty()
    assert asdict(Own()) == {"name": "own"}


def test_the_signature_is_known_before_the_first_object() -> None:
    expected = f"(name: 'str', parts: 'list[int]' = {MISSING}, *, note: 'str' = '') -> None"
    assert str(signature(Signed)) == expected


@pytest.mark.parametrize(
    ("values", "named", "message"),
    [
        ((), {}, r"Derived.__init__\(\) missing 1 required positional argument: 'name'"),
        (("a",), {"count": 1}, r"Derived.__init__\(\) got an unexpected keyword argument 'count'"),
        (("a", [], 1, "n"), {}, r"Derived.__init__\(\) takes from 2 to 4 positional arguments"),
    ],
)
def test_wrong_arguments(values: tuple[Any, ...], named: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Derived(*values, **named)
