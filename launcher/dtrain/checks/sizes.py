"""Amounts of memory as text. Pure."""

from __future__ import annotations

MIB, GIB = 1 << 20, 1 << 30


def in_words(size: int) -> str:
    """``512 MiB``, ``79.6 GiB``."""
    if size < GIB:
        return f"{size / MIB:.0f} MiB"
    return f"{size / GIB:.1f}".removesuffix(".0") + " GiB"
