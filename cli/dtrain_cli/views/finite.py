"""Values that JSON can express."""

from __future__ import annotations

import math
from typing import Any


def finite(value: Any) -> Any:
    """Replace infinite numbers and NaN, which JSON lacks, with None."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
