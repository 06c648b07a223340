"""The source of dtrain's own modules, to send to hosts."""

from __future__ import annotations

import functools
import importlib.util
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, ParamSpec, TypeVar, cast

if TYPE_CHECKING:
    from importlib.abc import InspectLoader

_Result = TypeVar("_Result")
_Arguments = ParamSpec("_Arguments")


def once(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """`functools.cache`, but one thread computes a result while others wait for it: the links of
    all hosts ask at the same moment."""
    lock, cached = threading.Lock(), functools.cache(function)

    @functools.wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        with lock:
            return cached(*args, **kwargs)  # type: ignore[arg-type]

    return call


def source(module: str) -> str:
    """The text of a module of dtrain, which may be in a zip archive: workers find one there."""
    text = loader(module).get_source(module)
    assert text is not None, module
    return text


@functools.cache
def loader(module: str) -> InspectLoader:
    """What imports a module of dtrain."""
    found = importlib.util.find_spec(module)
    assert found is not None, module
    return cast("InspectLoader", found.loader)
