"""Hostile input for everything that reads what hosts and files say.

A module here that has ``TARGETS`` is part of `scripts/fuzz`; a test beside it runs fewer inputs,
always the same ones.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import Any

FIXED_COST = 2.0
"""Seconds of processor time that any input may cost."""
COST = 2e-5
"""And more of them for each byte."""


def targets() -> list[Any]:
    """Those of all modules, see `fuzz.mutation.Target`."""
    modules = [one.name for one in pkgutil.iter_modules(__path__) if "test" not in one.name]
    found = [import_module(f"{__name__}.{name}") for name in sorted(modules)]
    return [target for module in found for target in getattr(module, "TARGETS", ())]
