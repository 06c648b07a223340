"""Options in messages of the library.

The library names its own fields, in backquotes: `micro_batch=4`, `offload=True`, `gpus`. On the
command line they are --micro-batch 4, --offload and --gpus.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields

from dtrain.diagnostics import UsageError

_FIELD = re.compile(r"""`(\w+)(?:=(['"]?)(.*?)\2)?`""")


def as_options(text: str) -> str:
    """Return the text with options instead of fields. Leaves other words in backquotes."""
    from dtrain.planning.request import FIXABLE, MODEL_SIZES, PlanRequest

    known = {*MODEL_SIZES, *FIXABLE, *(field.name for field in fields(PlanRequest))}

    def option(match: re.Match[str]) -> str:
        name, _, value = match.groups()
        if name not in known and name not in ("rendezvous", "bandwidth", "calibrate_run"):
            return match[0]
        name = "set" if name == "settings" else name.replace("_", "-")
        if value in (None, "True"):
            return f"--{name}"
        return f"--no-{name}" if value == "False" else f"--{name} {value}"

    return _FIELD.sub(option, text)


@contextmanager
def errors_name_options() -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        raise UsageError(as_options(error.message), hint=as_options(error.hint)) from error
