"""Nouns after numbers in messages. Pure."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """``1 host``, ``2,048 hosts``."""
    return f"{number:,} {plural(number, noun)}"


def plural(number: int, noun: str) -> str:
    """The regular ``noun`` as it follows ``number``."""
    if number == 1:
        return noun
    return f"{noun}es" if noun.endswith(("ch", "s")) else f"{noun}s"
