"""Stored measurements of `dtrain plan --probe`: ``<home>/probes/NAME.json``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from dtrain.runs.storage import home, storing
from dtrain.runs.stored_file import write_object


def store(name: str, document: dict[str, Any]) -> Path:
    """Write a file, which replaces an earlier one of that name. Raises StorageError."""
    folder = home() / "probes"
    # A GPU of the user's own table may have any name.
    path = folder / f"{re.sub(r'[^A-Za-z0-9._-]', '-', name)}.json"
    with storing(path):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_object(path, document, indent=2)
    return path
