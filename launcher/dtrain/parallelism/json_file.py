"""JSON that a user wrote, parsed with limits."""

from __future__ import annotations

from typing import Any

from dtrain.diagnostics import UsageError

MAX_DIGITS = 30
"""Of an integer: no size or count in these files needs more."""


def parse(text: str, where: str, hint: str) -> Any:
    """The value of a JSON text; ``where`` names the file in errors, ``hint`` what it should hold.

    Raises UsageError for what is not JSON, is nested too deeply, or holds a number that is too
    long, infinite or not a number.
    """
    import json  # 7 ms that commands without a file need not pay

    try:
        return json.loads(
            text, parse_int=_integer, parse_float=_number, parse_constant=_no_constant
        )
    except json.JSONDecodeError as error:
        message = f"{where}:{error.lineno}:{error.colno}: not JSON: {error.msg}"
    except ValueError as error:
        message = f"{where}: {error}"
    except RecursionError:
        message = f"{where}: nested too deeply"
    raise UsageError(message, hint=hint)


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits is too long")
    return int(digits)


def _number(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"the number {text[:MAX_DIGITS]} is too large")
    return value


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number")
