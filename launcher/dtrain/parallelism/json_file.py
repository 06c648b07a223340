"""Parse JSON files of users, with limits."""

from __future__ import annotations

from typing import Any

from dtrain.diagnostics import UsageError

MAX_DIGITS = 30
"""Digits of an integer; no size or count in these files needs more."""


def parse(text: str, where: str, hint: str) -> Any:
    """Parse a JSON text. ``where`` names the file in errors; ``hint`` describes its content.

    Raises UsageError if the text is not JSON, is nested too deeply, or has a number that is too
    long, infinite or NaN.
    """
    import json  # takes 7 ms, needed only for files

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
