"""Hostile input for everything that reads what hosts and files say.

A module here that has ``TARGETS`` is part of `scripts/fuzz`; a test beside it runs fewer inputs,
always the same ones.
"""

from __future__ import annotations

import pkgutil
import time
from importlib import import_module
from random import Random
from typing import Any

FIXED_COST = 2.0
"""Seconds of processor time that any input may cost."""
COST = 2e-5
"""And more of them for each byte."""
SEED = 20_250_101
"""Of the tests."""


def feed(target: Any, count: int) -> None:
    """Assert that ``count`` inputs of a target, always the same, cost little and fail cleanly."""
    name, generate, read = target
    random = Random(SEED)
    for _ in range(count):
        data = generate(random)
        begun = time.process_time()
        try:
            read(data)
        except Exception as error:
            raise AssertionError(f"{name}: {data[:2000]!r}") from error
        assert time.process_time() - begun < FIXED_COST + COST * len(data), (
            f"{name}: {data[:2000]!r}"
        )


def targets() -> list[Any]:
    """Those of all modules, see `fuzz.mutation.Target`."""
    modules = [one.name for one in pkgutil.iter_modules(__path__) if "test" not in one.name]
    found = [import_module(f"{__name__}.{name}") for name in sorted(modules)]
    return [target for module in found for target in getattr(module, "TARGETS", ())]
