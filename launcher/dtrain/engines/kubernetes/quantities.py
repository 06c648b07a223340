"""Amounts of resources as Kubernetes writes them. Pure."""

from __future__ import annotations

import re

from dtrain.messages.decode import ProtocolError

_UNITS = "kMGTPE"
_SUFFIXES = {
    "": 1.0,
    "m": 1e-3,
    **{unit: 1e3 ** (number + 1) for number, unit in enumerate(_UNITS)},
    **{f"{unit.upper()}i": 1024.0 ** (number + 1) for number, unit in enumerate(_UNITS)},
}
_QUANTITY = re.compile(
    r"([0-9]{1,30}(?:\.[0-9]{1,9})?)(?:(m|k|[MGTPE]|[KMGTPE]i)|[eE]([0-9]{1,2}))?"
)


def amount(text: str) -> float:
    """A quantity as Kubernetes writes it, such as ``8``, ``500m``, ``1.5Gi`` or ``1e3``. Raises
    ProtocolError."""
    found = _QUANTITY.fullmatch(text)
    if found is None:
        raise ProtocolError(f"not a quantity: {text[:40]!r}")
    return float(found[1]) * _SUFFIXES[found[2] or ""] * 10.0 ** int(found[3] or 0)


def written(amount: float) -> str:
    """``amount`` as text, with the largest unit that has no fraction."""
    for unit in reversed(_UNITS):
        size = _SUFFIXES[f"{unit.upper()}i"]
        if amount >= 10 * size and amount % size == 0:
            return f"{amount / size:.0f}{unit.upper()}i"
    return f"{amount:.10g}"
