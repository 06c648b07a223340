"""Reads the files that a request names: model, hardware and calibration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from dtrain.diagnostics import UsageError

_T = TypeVar("_T")

MAX_FILE = 16 << 20
"""Characters of a file."""


def parsed(path: Path, parse: Callable[[str, str], _T], missing: str) -> _T:
    """Read a user's UTF-8 file, and return the result of ``parse``. Raises UsageError. ``missing``:
    the hint if there is none."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            text = file.read(MAX_FILE + 1)
    except UnicodeDecodeError:
        raise UsageError(f"{str(path)!r} is not a text file") from None
    except (OSError, ValueError) as error:
        # Imported here, because a plan without a file reads none.
        from dtrain.spec.unreadable import unreadable

        raise unreadable(path, error, kind="*.json", missing=missing) from None
    if len(text) > MAX_FILE:
        raise UsageError(f"{str(path)!r} is too large: more than {MAX_FILE >> 20} MiB")
    return parse(text, str(path))
