"""Stored measurements of `dtrain plan --probe`: ``<home>/probes/NAME.json``."""

from __future__ import annotations

import os
from json import dumps
from pathlib import Path
from typing import Any

from dtrain.runs.log_store import home, storage_error


def store(name: str, document: dict[str, Any]) -> Path:
    """Write a file, which replaces an earlier one of that name. Raises StorageError."""
    folder = home() / "probes"
    path = folder / f"{name}.json"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(path, flags, 0o600), "w", encoding="utf-8") as file:
            file.write(dumps(document, indent=2) + "\n")
    except OSError as error:
        raise storage_error(path, error) from None
    return path
