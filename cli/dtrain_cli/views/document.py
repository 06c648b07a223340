"""JSON documents for programs."""

from __future__ import annotations

import json
import math
from typing import Any


def document(body: dict[str, Any]) -> str:
    """Return ``body`` as JSON. It is ASCII, because a host may send text that no encoding has."""
    return json.dumps(finite(body), indent=2) + "\n"


def finite(value: Any) -> Any:
    """Replace infinite numbers and NaN, which JSON lacks, with None."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
