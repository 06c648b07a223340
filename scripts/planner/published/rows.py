"""The rows of a CSV file of published runs, and the numbers in their cells."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from pathlib import Path

from dtrain.diagnostics import UsageError

Row = Mapping[str, str]


class UnusableError(Exception):
    """A row without a comparable estimate. The message is the reason, and groups such rows."""


_NUMBER = re.compile(r"[-+]?\d[\d,_]*(?:\.\d+)?(?:e[-+]?\d+)?", re.IGNORECASE)


def number(row: Row, column: str) -> float | None:
    """The first number of a cell (``1,536``, ``~66.5 GiB``), or None if it has none above 0."""
    found = _NUMBER.search(row.get(column) or "")
    value = float(found[0].replace(",", "").replace("_", "")) if found else 0.0
    return value if 0 < value < 1e15 else None


def count(row: Row, column: str) -> int | None:
    """Like `number`, for integer counts."""
    value = number(row, column)
    return round(value) if value is not None and value >= 0.5 else None


def rows(path: Path) -> list[dict[str, str]]:
    """A file's rows. Missing columns and cells read as blanks.

    Raises:
        UsageError: the file cannot be read, or has no such columns at all.
    """
    try:
        text = path.read_text("utf-8-sig", errors="replace")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", hint="give a CSV file") from None
    reader = csv.DictReader(text.splitlines(keepends=True), restkey="rest", restval="")
    try:
        columns = {(name or "").strip() for name in reader.fieldnames or ()}
        if not {"source", "gpu_type"} <= columns:
            raise UsageError(
                f"{path}: the first line has no columns source and gpu_type",
                hint="the format is that of tests/parallelism/data/published_runs.csv",
            )
        return [
            {key.strip(): value.strip() for key, value in row.items()
             if isinstance(key, str) and isinstance(value, str)}
            for row in reader
        ]  # fmt: skip
    except csv.Error as error:
        line = reader.reader.line_num
        raise UsageError(f"{path}:{line}: {error}", hint="give a CSV file") from None


def noted(text: str, *patterns: str) -> int | None:
    """The number that the first matching pattern captures."""
    for pattern in patterns:
        if found := re.search(pattern, text, re.IGNORECASE):
            return int(found[1]) or None
    return None
