"""`dtrain.records.dataclass` is the standard library's, with fewer functions to compile."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from dtrain import records

Decorator = Callable[..., Any]


def shapes(dataclass: Decorator) -> list[type]:
    """Classes of all kinds that dtrain has."""

    @dataclass(frozen=True, slots=True)
    class Empty:
        pass

    @dataclass(frozen=True, slots=True)
    class Point:
        x: int
        y: int = 2

    @dataclass(slots=True)
    class Box:
        name: str
        items: list[int] = dataclasses.field(default_factory=list)
        sizes: dict[str, int] = dataclasses.field(default_factory=lambda: {"a": 1})
        hidden: int = dataclasses.field(default=3, repr=False, compare=False)

    @dataclass(frozen=True)
    class Derived(Point):
        z: int = 0
        total: int = dataclasses.field(init=False, compare=False)

        def __post_init__(self) -> None:
            object.__setattr__(self, "total", self.x + self.y + self.z)

    return [Empty, Point, Box, Derived]


CALLS: list[tuple[int, tuple[Any, ...], dict[str, Any]]] = [
    (0, (), {}),
    (1, (1,), {}),
    (1, (1, 5), {}),
    (1, (), {"y": 7, "x": 6}),
    (2, ("n",), {}),
    (2, ("n", [4]), {"sizes": {}, "hidden": 9}),
    (3, (1, 2, 3), {}),
    (3, (1,), {"z": 10}),
]


@pytest.mark.parametrize(("which", "args", "options"), CALLS)
def test_objects_are_as_the_standard_library_makes_them(
    which: int, args: tuple[Any, ...], options: dict[str, Any]
) -> None:
    theirs, ours = (
        shapes(each)[which](*args, **options) for each in (dataclasses.dataclass, records.dataclass)
    )
    assert dataclasses.asdict(ours) == dataclasses.asdict(theirs)
    assert repr(ours) == repr(theirs)
    assert ours == copy.copy(ours)
    assert ours != theirs


@pytest.mark.parametrize(
    ("which", "args", "options"),
    [
        (0, (1,), {}),
        (1, (), {}),
        (1, (1, 2, 3), {}),
        (2, (), {"items": []}),
        (3, (1,), {"total": 5}),
    ],
)
def test_a_wrong_call_is_refused_with_the_same_words(
    which: int, args: tuple[Any, ...], options: dict[str, Any]
) -> None:
    messages = []
    for each in (dataclasses.dataclass, records.dataclass):
        with pytest.raises(TypeError) as caught:
            shapes(each)[which](*args, **options)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


@pytest.mark.parametrize(
    ("fields", "bases"),
    [
        ({"a": dataclasses.field(default=1), "b": dataclasses.field()}, ()),
        ({"z": dataclasses.field()}, (shapes(records.dataclass)[1],)),
        ({"a": dataclasses.field(kw_only=True)}, ()),
        ({"a": dataclasses.field(init=False, default=1)}, ()),
        ({"a": dataclasses.field(init=False, default_factory=list)}, ()),
    ],
)
def test_a_class_that_would_differ_from_the_standard_library_is_refused(
    fields: dict[str, Any], bases: tuple[type, ...]
) -> None:
    given = type("Given", bases, {**fields, "__annotations__": dict.fromkeys(fields, "int")})
    with pytest.raises(TypeError, match=r"^Given: fields with defaults come last"):
        records.dataclass(given)


def test_each_object_gets_its_own_default() -> None:
    box = shapes(records.dataclass)[2]
    first, second = box("a"), box("b")
    first.items.append(1)
    assert (first.items, second.items) == ([1], [])


def test_a_signature_has_names_types_and_defaults() -> None:
    theirs, ours = (
        inspect.signature(shapes(each)[1]) for each in (dataclasses.dataclass, records.dataclass)
    )
    assert str(ours) == str(theirs)


def test_frozen_objects_are_keys() -> None:
    point = shapes(records.dataclass)[1]
    assert {point(1): "found"}[point(1, 2)] == "found"
    with pytest.raises(TypeError, match="unhashable"):
        hash(shapes(records.dataclass)[2]("a"))


@records.dataclass(frozen=True, slots=True)
class Sent:
    what: str
    to: tuple[str, ...] = ()


def test_objects_travel_to_other_processes() -> None:
    assert pickle.loads(pickle.dumps(Sent("it", ("a",)))) == Sent("it", ("a",))  # noqa: S301
