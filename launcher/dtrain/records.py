"""`dataclass` as in the standard library, for classes that take little time to make.

Before Python 3.13, the standard library compiles six functions for each frozen class: half a
millisecond, and a third of what `dtrain launch` did before its first connection. Here all classes
share the functions below, and each ``__init__`` is a copy with other names of one that is compiled
once for each number of fields. Frozen classes have no ``__setattr__``: the type checker finds
assignments to their fields.
"""

from __future__ import annotations

import functools
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, fields
from operator import attrgetter
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, TypeVar

T = TypeVar("T")


class KeepsHash:
    """Base of frozen classes whose objects compute their hash once: a search looks up costs of the
    same objects tens of thousands of times."""


def shallow(record: Any) -> dict[str, Any]:
    """The fields, for JSON. `asdict` would copy what they contain, which takes longer than to write
    it."""
    return {one.name: getattr(record, one.name) for one in fields(record)}


def changed(record: T, **values: Any) -> T:
    """As `replace`, in a sixth of its time. ``record`` has no slots, no ``__post_init__``, and no
    values that it keeps beside its fields: they would be copied."""
    made: T = object.__new__(type(record))
    vars(made).update(vars(record), **values)
    return made


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
        slots: bool = False,
    ) -> Any:
        """As `dataclasses.dataclass`. Raises TypeError for fields that no class of dtrain has."""

        def make(given: type) -> type:
            given.__doc__ = given.__doc__ or given.__name__  # or its signature would be inspected
            made = dataclasses.dataclass(given, init=False, eq=False, repr=False, slots=slots)
            found = fields(made)
            methods = {"__init__": _initializer(made, found)}
            if repr:
                methods["__repr__"] = _representation(found)
            if eq:
                methods |= _comparison(found, hashable=frozen)
            if issubclass(given, KeepsHash):
                methods["__hash__"] = _kept(methods["__hash__"])
            for name, method in methods.items():
                if name not in given.__dict__:
                    setattr(made, name, method)
            return made

        return make if cls is None else make(cls)


def _initializer(made: type, found: Sequence[Field[Any]]) -> Callable[..., None]:
    taken = [one for one in found if one.init]
    required = [not _has_default(one) for one in taken]
    if (
        required != sorted(required, reverse=True)
        or any(one.kw_only for one in taken)
        or any(_has_default(one) for one in found if not one.init)
    ):
        raise TypeError(
            f"{made.__qualname__}: fields with defaults come last, none is `kw_only`, and one with "
            "`init=False` has no default"
        )
    makers = {at: one.default_factory for at, one in enumerate(taken)}
    makers = {at: make for at, make in makers.items() if make is not MISSING}
    code = _initializer_code(len(taken), tuple(makers), hasattr(made, "__post_init__"))
    names = {f"_{at}": one.name for at, one in enumerate(taken)}
    code = code.replace(
        co_names=tuple(names.get(name, name) for name in code.co_names),
        co_varnames=tuple(names.get(name, name) for name in code.co_varnames),
    )
    scope = {"MISSING": MISSING, **{f"make_{at}": make for at, make in makers.items()}}
    # A factory's argument is MISSING by default, as is that of a field without a default.
    optional = [one for one in taken if _has_default(one)]
    init = FunctionType(code, scope, "__init__", tuple(one.default for one in optional))
    init.__qualname__ = f"{made.__qualname__}.__init__"
    init.__annotations__ = {**{one.name: one.type for one in taken}, "return": None}
    return init


def _has_default(one: Field[Any]) -> bool:
    return one.default is not MISSING or one.default_factory is not MISSING


@functools.cache
def _initializer_code(count: int, made: Sequence[int], has_post_init: bool) -> CodeType:
    """``__init__`` for fields named ``_0``, ``_1`` and so on. Those at ``made`` have factories."""
    given = "self._{0} = _{0}"
    or_made = "self._{0} = make_{0}() if _{0} is MISSING else _{0}"
    body = [(or_made if at in made else given).format(at) for at in range(count)]
    body += ["self.__post_init__()"] if has_post_init else []
    arguments = ", ".join(["self", *(f"_{at}" for at in range(count))])
    scope: dict[str, Any] = {}
    exec(f"def __init__({arguments}):\n " + "\n ".join(body or ["pass"]), scope)  # noqa: S102
    code: CodeType = scope["__init__"].__code__
    return code


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
