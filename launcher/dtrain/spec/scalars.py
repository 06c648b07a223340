"""Types of single values in configuration files. Each reads a node and describes itself.

The expected type decides how a value is read, not the guesses of YAML 1.1. As text, ``no``,
``010``, ``12:00:00`` and ``1e-5`` stay exactly as written; as a number, ``010`` is ten and ``1e-5``
is a number. A quoted value is always text.

``read`` returns None if it reported a problem, and a value otherwise.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from dtrain.records import dataclass
from dtrain.spec import source
from dtrain.spec.problems import Problems, nearest, shown, visible
from dtrain.spec.source import Node, Scalar
from dtrain.wording import either

T = TypeVar("T")
JsonSchema = dict[str, Any]
_CONTROL = re.compile(r"[\x01-\x1f\x7f-\x9f]")
"""Without NUL, which no value can have: see `source`."""

Check = Callable[[str], str]
"""Returns what is wrong with a text as the end of a sentence (``cannot …``), or an empty text."""


class Type(ABC, Generic[T]):
    @property
    @abstractmethod
    def expects(self) -> str:
        """Completes "must be …"."""

    @abstractmethod
    def read(self, node: Node, problems: Problems, name: str) -> T | None:
        """The value of ``node``; ``name`` is its name in messages."""

    @abstractmethod
    def json_schema(self) -> JsonSchema:
        """The type as JSON Schema, draft 2020-12."""

    def refuse(self, node: Node, problems: Problems, name: str, hint: str = "") -> T | None:
        """Report that ``node`` has another type. Returns None, for `read` to return."""
        if isinstance(node, source.Broken):
            return None
        found = describe(node)
        problems.add(
            f"{name} has no value; it must be {self.expects}"
            if found is None
            else f"{name} must be {self.expects}, not {found}",
            node.place,
            hint,
        )
        return None


@dataclass(frozen=True)
class Text(Type[str]):
    """Text, exactly as written."""

    check: Check | None = None
    pattern: str | None = None
    """For the JSON Schema only; ``check`` decides."""
    empty: bool = False
    """Whether a quoted empty text is valid."""
    lines: bool = False
    """Whether it can have line breaks and other control characters, as no path or name has."""
    expects: str = "text"

    def read(self, node: Node, problems: Problems, name: str) -> str | None:
        if not isinstance(node, Scalar):
            return self.refuse(node, problems, name, quote_hint(node))
        if node.empty:
            hint = 'write "" for an empty text' if self.empty else ""
            return self.refuse(node, problems, name, hint)
        if not node.text and not self.empty:
            problems.add(f"{name} cannot be empty", node.place)
            return None
        if not self.lines and (found := _CONTROL.search(node.text)):
            problems.add(
                f"{name} cannot contain the character {visible(found[0])}", node.place, "remove it"
            )
            return None
        wrong = self.check(node.text) if self.check else ""
        if wrong:
            problems.add(f"{name} {wrong}", node.place)
            return None
        return node.text

    def json_schema(self) -> JsonSchema:
        # Editors read plain `8`, `1e-5` and `true` as numbers and booleans.
        schema: JsonSchema = {"type": ["string", "number", "boolean"]}
        if self.pattern:
            schema["pattern"] = self.pattern
        elif not self.empty:
            schema["minLength"] = 1
        return schema


@dataclass(frozen=True)
class Integer(Type[int]):
    """A whole number from ``minimum`` to ``maximum``."""

    minimum: int
    maximum: int
    also: str = ""
    """The alternative, if this is one type of a `OneOf`."""

    @property
    def expects(self) -> str:
        return f"a whole number from {self.minimum} to {self.maximum}{self.also}"

    def read(self, node: Node, problems: Problems, name: str) -> int | None:
        text = plain_text(node, _WHOLE)
        if text is None or not self.minimum <= int(text) <= self.maximum:
            return self.refuse(node, problems, name, unquote_hint(node, _WHOLE))
        return int(text)

    def json_schema(self) -> JsonSchema:
        return {"type": "integer", "minimum": self.minimum, "maximum": self.maximum}


@dataclass(frozen=True)
class OneNumber(Type[int]):
    """One of a few whole numbers."""

    options: tuple[int, ...]

    @property
    def expects(self) -> str:
        return either(map(str, self.options))

    def read(self, node: Node, problems: Problems, name: str) -> int | None:
        text = plain_text(node, _WHOLE)
        if text is None or int(text) not in self.options:
            return self.refuse(node, problems, name, unquote_hint(node, _WHOLE))
        return int(text)

    def json_schema(self) -> JsonSchema:
        return {"enum": list(self.options)}


_WHOLE = r"[+-]?[0-9]{1,18}"
_DECIMAL = r"[+-]?([0-9]{1,18}(\.[0-9]{0,18})?|\.[0-9]{1,18})([eE][+-]?[0-9]{1,2})?"


@dataclass(frozen=True)
class Number(Type[float]):
    expects: str = "a number above 0"

    def read(self, node: Node, problems: Problems, name: str) -> float | None:
        text = plain_text(node, _DECIMAL)
        if text is None or float(text) <= 0:
            return self.refuse(node, problems, name, unquote_hint(node, _DECIMAL))
        return float(text)

    def json_schema(self) -> JsonSchema:
        return {"type": "number", "exclusiveMinimum": 0}


@dataclass(frozen=True)
class Flag(Type[bool]):
    """``true`` or ``false``. The other spellings of YAML 1.1 are refused with a hint."""

    expects: str = "true or false"

    def read(self, node: Node, problems: Problems, name: str) -> bool | None:
        text = node.text.lower() if isinstance(node, Scalar) else ""
        if text in ("true", "false") and plain_text(node, ".*"):
            return text == "true"
        hint = unquote_hint(node, "true|false")
        if text in ("yes", "on", "y", "1", "no", "off", "n", "0"):
            hint = f"write {'true' if text in ('yes', 'on', 'y', '1') else 'false'}"
        return self.refuse(node, problems, name, hint)

    def json_schema(self) -> JsonSchema:
        return {"type": "boolean"}


_UNITS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_AMOUNT = r"[0-9]{1,9}(\.[0-9]{1,9})?"
_DURATION = re.compile(rf"({_AMOUNT}(d|h|ms|m|s))+")


@dataclass(frozen=True)
class Duration(Type[float]):
    """Seconds, from ``10s``, ``5m``, ``1h30m`` or a bare number of seconds."""

    minimum: float = 0.0

    @property
    def expects(self) -> str:
        unit = "second" if self.minimum == 1 else "seconds"
        least = f" of at least {self.minimum:g} {unit}" if self.minimum else ""
        examples = "30s, 5m or 1h30m" if self.minimum < 60 else "30m, 12h or 2d"
        return f"a duration{least}, such as {examples}"

    def read(self, node: Node, problems: Problems, name: str) -> float | None:
        value = seconds(node.text.strip()) if isinstance(node, Scalar) else None
        if value is None or value < self.minimum:
            return self.refuse(node, problems, name)
        return value

    def json_schema(self) -> JsonSchema:
        return {
            "anyOf": [
                {"type": "number", "minimum": self.minimum},
                {"type": "string", "pattern": rf"^({_AMOUNT}|({_AMOUNT}(d|h|ms|m|s))+)$"},
            ]
        }


def seconds(text: str) -> float | None:
    """A duration such as ``90``, ``10m`` or ``1h30m`` in seconds; None for anything else."""
    if re.fullmatch(_AMOUNT, text):
        return float(text)
    if not _DURATION.fullmatch(text):
        return None
    amounts = re.findall(r"([0-9.]+)(d|h|ms|m|s)", text)
    return sum(float(amount) * _UNITS[unit] for amount, unit in amounts)


@dataclass(frozen=True)
class Choice(Type[str]):
    options: tuple[str, ...]

    @property
    def expects(self) -> str:
        return either(self.options)

    def read(self, node: Node, problems: Problems, name: str) -> str | None:
        if isinstance(node, Scalar) and node.text in self.options:
            return node.text
        close = nearest(node.text, self.options) if isinstance(node, Scalar) else None
        return self.refuse(node, problems, name, f"did you mean {shown(close)}?" if close else "")

    def json_schema(self) -> JsonSchema:
        return {"enum": list(self.options)}


def describe(node: Node) -> str | None:
    """A node, for a message; None if it is empty."""
    if isinstance(node, source.Sequence):
        return "a list"
    if isinstance(node, source.Mapping):
        return "keys with values"
    if not isinstance(node, Scalar) or node.empty:
        return None
    return shown(node.text) if node.plain else f"the text {shown(node.text)}"


def plain_text(node: Node, pattern: str) -> str | None:
    """The text of an unquoted scalar that matches."""
    if isinstance(node, Scalar) and node.plain and re.fullmatch(pattern, node.text):
        return node.text
    return None


def quote_hint(node: Node) -> str:
    """The hint for text such as ``{rank}``, which YAML reads as keys with values."""
    if isinstance(node, source.Mapping) and len(node.entries) == 1:
        (entry,) = node.entries
        if isinstance(entry.value, Scalar) and entry.value.empty:
            return f'put it in quotes: "{{{entry.key.text}}}"'
    return ""


def unquote_hint(node: Node, pattern: str) -> str:
    """The hint for a value that would be valid without its quotes."""
    if isinstance(node, Scalar) and not node.plain and re.fullmatch(pattern, node.text):
        return "remove the quotes"
    return ""
