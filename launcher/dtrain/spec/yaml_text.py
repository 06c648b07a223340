"""Values as the text of a YAML file. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

Values = Mapping[str, object]
"""Keys of one section, with int, bool or str values; None means that the key is absent."""

_WIDTH = 100
"""Longest section written on one line, in columns. A longer one gets a line for each key."""
_BARE = re.compile(r"(?:[A-Za-z_/~]|\.(?![0-9])|[0-9]+[df])[A-Za-z0-9_./~-]*")
"""Text that needs no quotes, such as ``3d`` and ``1f1b``, unless it is one of `_WORDS`."""
_WORDS = {"true", "false", "null", "yes", "no", "on", "off", "y", "n", "~", ".inf", ".nan"}
"""What a program that reads YAML may take for another type."""


def literal(value: object, quote: str = "") -> str:
    """A value as YAML; text in quotes if it needs them. ``quote`` is the quote character to prefer
    for text, if any."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, str):
        return str(value)
    if quote == "'" and value.isprintable():
        return "'" + value.replace("'", "''") + "'"
    if quote == '"' or not _BARE.fullmatch(value) or value.lower() in _WORDS:
        return json.dumps(value, ensure_ascii=False)
    return value


def item(key: str, value: object, quote: str = "") -> str:
    """``key: value`` on one line, in JSON style if ``quote`` is ``"``."""
    inner = flow(value, quote) if isinstance(value, Mapping) else literal(value, quote)
    return f"{literal(key, quote)}: {inner}"


def flow(values: Values, quote: str) -> str:
    return "{" + ", ".join(item(key, value, quote) for key, value in values.items()) + "}"


def lines(key: str, value: object, indent: str, step: str) -> list[str]:
    """A key of a block mapping, on one line if it fits."""
    line = indent + item(key, value)
    if len(line) <= _WIDTH or not isinstance(value, Mapping):
        return [line]
    return block(key, value, indent, step)


def block(key: str, values: Values, indent: str, step: str) -> list[str]:
    return [f"{indent}{key}:", *(indent + step + item(k, v) for k, v in values.items())]
