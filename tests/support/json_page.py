"""Compares real ``--json`` output with the page `dtrain help json`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

HELP = Path(__file__).resolve().parents[2] / "cli" / "dtrain_cli" / "help"
NAMED = set(re.findall(r"`(\w+)`", (HELP / "json.md").read_text(encoding="utf-8")))
OPEN = (
    "model",
    "environment",
    "node_variables",
    "files",
    "layout",
    "metrics",
    "facts",
    "dialed",
    "seconds",
    "expected",
)
"""Fields whose content the page does not list."""


def undocumented(document: object) -> set[str]:
    """The names of all fields that the page lacks."""
    return set(fields(document)) - NAMED


def fields(value: object) -> Iterator[str]:
    """The names of all fields; those of `OPEN` without their content."""
    if isinstance(value, list):
        for item in value:
            yield from fields(item)
    elif isinstance(value, dict):
        for name, inner in value.items():
            # In `ps --json`, hosts are by name.
            if not name.startswith("gpu0"):
                yield name
            if name not in OPEN:
                yield from fields(inner)
