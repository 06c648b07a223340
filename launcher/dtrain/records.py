"""`dataclass` as in the standard library, for classes that take little time to make.

Before Python 3.13, the standard library compiles six functions for each frozen class: half a
millisecond, and a third of what `dtrain launch` did before its first connection. Here it compiles
only ``__init__``; all classes share the functions below. Frozen classes have no ``__setattr__``:
the type checker finds assignments to their fields.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Sequence
from dataclasses import Field, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any


class KeepsHash:
    """Base of frozen classes whose objects compute their hash once: a search looks up costs of the
    same objects tens of thousands of times."""


def shallow(record: Any) -> dict[str, Any]:
    """The fields, for JSON. `asdict` would copy what they contain, which takes longer than to write
    it."""
    return {one.name: getattr(record, one.name) for one in fields(record)}


if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
    from functools import cached_property as cached_property
else:
    import dataclasses

    class cached_property:  # noqa: N801  named as in the standard library
        """As in `functools`, without its lock: before Python 3.12, the lock takes more time than
        most of the planner's properties, which a search computes hundreds of thousands of times."""

        def __init__(self, compute: Callable[[Any], Any]) -> None:
            self._compute = compute
            self.__doc__ = compute.__doc__

        def __set_name__(self, owner: type, name: str) -> None:
            self._name = name

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            if instance is None:
                return self
            value = instance.__dict__[self._name] = self._compute(instance)
            return value

    def dataclass(
        cls: type | None = None,
        /,
        *,
        eq: bool = True,
        repr: bool = True,
        frozen: bool = False,
        **options: bool,
    ) -> Any:
        """As `dataclasses.dataclass`."""

        def make(given: type) -> type:
            given.__doc__ = given.__doc__ or given.__name__  # or its signature would be inspected
            made = dataclasses.dataclass(given, eq=False, repr=False, **options)
            found = fields(made)
            methods = {"__repr__": _representation(found)} if repr else {}
            if eq:
                methods |= _comparison(found, hashable=frozen)
            if issubclass(given, KeepsHash):
                methods["__hash__"] = _kept(methods["__hash__"])
            for name, method in methods.items():
                if name not in given.__dict__:
                    setattr(made, name, method)
            return made

        return make if cls is None else make(cls)


def _representation(found: Sequence[Field[Any]]) -> Callable[[Any], str]:
    names = [one.name for one in found if one.repr]

    @reprlib.recursive_repr()
    def represent(self: Any) -> str:
        values = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return f"{type(self).__qualname__}({values})"

    return represent


def _comparison(found: Sequence[Field[Any]], *, hashable: bool) -> dict[str, Any]:
    values = _values([one.name for one in found if one.compare])
    hashed = _values([one.name for one in found if (one.compare if one.hash is None else one.hash)])

    def equal(self: Any, other: Any) -> Any:
        return (
            values(self) == values(other) if other.__class__ is self.__class__ else NotImplemented
        )

    def hash_of(self: Any) -> int:
        return hash(hashed(self))

    return {"__eq__": equal, "__hash__": hash_of if hashable else None}


def _kept(hash_of: Callable[[Any], int]) -> Callable[[Any], int]:
    def kept(self: Any) -> int:
        own: dict[str, Any] = self.__dict__
        if "_hash" not in own:
            own["_hash"] = hash_of(self)
        found: int = own["_hash"]
        return found

    return kept


def _values(names: Sequence[str]) -> Callable[[Any], Any]:
    return attrgetter(*names) if names else lambda _: ()
