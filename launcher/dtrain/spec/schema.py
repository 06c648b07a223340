"""A small set of types for configuration files: each reads a node and describes itself.

What a value means follows from the type that is expected, never from how YAML 1.1 would guess:
where text is expected, ``no``, ``010``, ``12:00:00`` and ``1e-5`` are text, letter by letter;
where a number is expected, ``010`` is ten and ``1e-5`` a number. Quotes make text, always.

``read`` returns None when it reported a problem, and a value otherwise.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from dtrain.spec import source
from dtrain.spec.problems import Problems, TextSpan, either, nearest, shown
from dtrain.spec.source import Node, Scalar

T = TypeVar("T")
JsonSchema = dict[str, Any]

Check = Callable[[str], str]
"""Says what is wrong with a text as the end of a sentence (``cannot …``), or nothing."""


class Type(ABC, Generic[T]):
    """What a value may be."""

    @property
    @abstractmethod
    def expects(self) -> str:
        """Completes "must be …"."""

    @abstractmethod
    def read(self, node: Node, problems: Problems, name: str) -> T | None:
        """The value of ``node``, which messages call ``name``."""

    @abstractmethod
    def json_schema(self) -> JsonSchema:
        """The same as JSON Schema, draft 2020-12."""

    def refuse(self, node: Node, problems: Problems, name: str, hint: str = "") -> T | None:
        """Report that ``node`` is something else; returns None, as `read` then does."""
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
    """For the JSON Schema alone; ``check`` decides."""
    empty: bool = False
    """Whether a quoted empty text is fine."""
    expects: str = "text"

    def read(self, node: Node, problems: Problems, name: str) -> str | None:
        if not isinstance(node, Scalar):
            return self.refuse(node, problems, name, _quote(node))
        if node.empty:
            hint = 'write "" for an empty text' if self.empty else ""
            return self.refuse(node, problems, name, hint)
        if not node.text and not self.empty:
            problems.add(f"{name} cannot be empty", node.place)
            return None
        wrong = self.check(node.text) if self.check else ""
        if wrong:
            problems.add(f"{name} {wrong}", node.place)
            return None
        return node.text

    def json_schema(self) -> JsonSchema:
        # Editors see plain `8`, `1e-5` and `true` as numbers and flags.
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
    """What else would be right, where this is one type of a `OneOf`."""

    @property
    def expects(self) -> str:
        return f"a whole number from {self.minimum} to {self.maximum}{self.also}"

    def read(self, node: Node, problems: Problems, name: str) -> int | None:
        text = _plain(node, _WHOLE)
        if text is None:
            return self.refuse(node, problems, name, _unquote(node, _WHOLE))
        value = int(text)
        if not self.minimum <= value <= self.maximum:
            return self.refuse(node, problems, name)
        return value

    def json_schema(self) -> JsonSchema:
        return {"type": "integer", "minimum": self.minimum, "maximum": self.maximum}


_WHOLE = r"[+-]?[0-9]{1,18}"
_DECIMAL = r"[+-]?([0-9]{1,18}(\.[0-9]{0,18})?|\.[0-9]{1,18})([eE][+-]?[0-9]{1,2})?"


@dataclass(frozen=True)
class Number(Type[float]):
    above: float
    """Values are greater than this."""

    @property
    def expects(self) -> str:
        return f"a number above {self.above:g}"

    def read(self, node: Node, problems: Problems, name: str) -> float | None:
        text = _plain(node, _DECIMAL)
        if text is None:
            return self.refuse(node, problems, name, _unquote(node, _DECIMAL))
        value = float(text)
        return value if value > self.above else self.refuse(node, problems, name)

    def json_schema(self) -> JsonSchema:
        return {"type": "number", "exclusiveMinimum": self.above}


@dataclass(frozen=True)
class Flag(Type[bool]):
    """``true`` or ``false``; YAML 1.1's other spellings are refused with a hint."""

    expects: str = "true or false"

    def read(self, node: Node, problems: Problems, name: str) -> bool | None:
        text = node.text.lower() if isinstance(node, Scalar) else ""
        if text in ("true", "false") and _plain(node, ".*"):
            return text == "true"
        hint = _unquote(node, "true|false")
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
        least = f" of at least {self.minimum:g} seconds" if self.minimum else ""
        return f"a duration{least}, such as 30s, 5m or 1h30m"

    def read(self, node: Node, problems: Problems, name: str) -> float | None:
        if not isinstance(node, Scalar):
            return self.refuse(node, problems, name)
        value = seconds(node.text.strip())
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


@dataclass(frozen=True)
class ListOf(Type[tuple[T, ...]]):
    item: Type[T]
    unique: bool = False
    minimum: int = 0
    advice: str = ""
    """Hint for someone who wrote something else."""
    what: str = ""

    @property
    def expects(self) -> str:
        return f"a list{' of ' + self.what if self.what else ''}"

    def read(self, node: Node, problems: Problems, name: str) -> tuple[T, ...] | None:
        if isinstance(node, Scalar) and node.empty and not self.minimum:
            return ()
        if not isinstance(node, source.Sequence):
            return self.refuse(node, problems, name, self.advice)
        if len(node.items) < self.minimum:
            problems.add(f"{name} cannot be empty", node.place)
            return None
        values: dict[int, T] = {}
        first: dict[T, Node] = {}
        for index, item in enumerate(node.items):
            value = self.item.read(item, problems, f"{name}[{index}]")
            if value is None:
                continue
            if self.unique and value in first:
                problems.add(
                    f"{name} lists {shown(str(value))} twice",
                    item.place,
                    f"keep one; the first is on line {first[value].place.line}",
                )
            first.setdefault(value, item)
            values[index] = value
        return tuple(values.values())

    def json_schema(self) -> JsonSchema:
        schema: JsonSchema = {"type": "array", "items": self.item.json_schema()}
        if self.minimum:
            schema["minItems"] = self.minimum
        else:
            schema["type"] = ["array", "null"]
        if self.unique:
            schema["uniqueItems"] = True
        return schema


@dataclass(frozen=True)
class MapOf(Type[dict[str, T]]):
    """Free keys, checked by ``key``, all with values of one type."""

    value: Type[T]
    key: Check | None = None
    key_pattern: str | None = None
    what: str = "keys"
    expects: str = "keys with values"

    def read(self, node: Node, problems: Problems, name: str) -> dict[str, T] | None:
        if isinstance(node, Scalar) and node.empty:
            return {}
        if not isinstance(node, source.Mapping):
            return self.refuse(node, problems, name, f"write {self.what}, one on each line")
        values: dict[str, T] = {}
        for entry in node.entries:
            wrong = self.key(entry.key.text) if self.key else ""
            if wrong:
                problems.add(f"the key {shown(entry.key.text)} of {name} {wrong}", entry.key.place)
            value = self.value.read(entry.value, problems, f"{name}.{short(entry.key.text)}")
            if value is not None and not wrong:
                values[entry.key.text] = value
        return values

    def json_schema(self) -> JsonSchema:
        schema: JsonSchema = {
            "type": ["object", "null"],
            "additionalProperties": self.value.json_schema(),
        }
        if self.key_pattern:
            schema["propertyNames"] = {"pattern": self.key_pattern}
        return schema


@dataclass(frozen=True)
class Field:
    """One key of a record."""

    type: Type[Any]
    description: str
    """What the key does: one or two sentences, which editors show and `reference` prints."""
    required: bool = False
    default: Any = None
    """What holds if the key is left out, where that is one value."""
    otherwise: str = ""
    """What holds if the key is left out, in words, where that is not one value."""
    example: str = ""
    """A value, as YAML."""
    only: str = ""
    """The framework that the key applies to; empty for a key that applies to each."""

    @property
    def summary(self) -> str:
        """The description, with the default and the framework where these need words."""
        default = f" Default: {self.otherwise}." if self.otherwise else ""
        return f"{self.description}{default}{f' For {self.only} only.' if self.only else ''}"


@dataclass(frozen=True)
class Section:
    """A record that was read: its good values, and where everything stands."""

    values: Mapping[str, Any]
    entries: Mapping[str, source.Entry]
    """By key, also those whose value is broken."""
    head: TextSpan

    def __contains__(self, key: str) -> bool:
        """Whether the file gives the key, rightly or wrongly."""
        return key in self.entries

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(key, default)

    def given(self, *keys: str) -> dict[str, Any]:
        """The good values among ``keys``."""
        return {key: self.values[key] for key in keys if key in self.values}

    def sound(self, *keys: str) -> bool:
        """Whether each key is absent or was read without a problem."""
        return all(key in self.values for key in keys if key in self)

    def place(self, key: str) -> TextSpan:
        """Where the key's value stands; without one, the section's head."""
        return self.entries[key].value.place if key in self.entries else self.head

    def key_place(self, key: str) -> TextSpan:
        return self.entries[key].key.place if key in self.entries else self.head

    def section(self, key: str) -> Section:
        """The record at ``key``, empty where there is none."""
        found = self.values.get(key)
        return found if isinstance(found, Section) else Section({}, {}, self.key_place(key))


@dataclass(frozen=True)
class SectionType(Type[Section]):
    """Known keys, each with its own type."""

    fields: Mapping[str, Field]
    title: str = ""
    """What messages call a record that has no name: the whole file."""
    expects: str = "keys with values"

    def read(self, node: Node, problems: Problems, name: str) -> Section | None:
        if isinstance(node, Scalar) and node.empty:
            node = source.Mapping((), node.place, node.place)
        if not isinstance(node, source.Mapping):
            return self.refuse(node, problems, name or self.title)
        prefix = f"{name}." if name else ""
        entries: dict[str, source.Entry] = {}
        values: dict[str, Any] = {}
        meant: set[str | None] = set()
        for entry in node.entries:
            key = entry.key.text
            known = self.fields.get(key)
            if known is None:
                meant.add(self._unknown(entry.key, problems, name))
                continue
            entries[key] = entry
            value = known.type.read(entry.value, problems, prefix + key)
            if value is not None:
                values[key] = value
        for key, known in self.fields.items():
            if known.required and key not in entries and key not in meant:
                purpose = known.description[0].lower() + known.description[1:].rstrip(".")
                problems.add(f"{prefix}{key} is missing", node.head, f"add '{key}:', {purpose}")
        return Section(values, entries, node.head)

    def _unknown(self, key: Scalar, problems: Problems, name: str) -> str | None:
        """Report an unknown key; returns the key that was probably meant."""
        if problems.full:
            return None
        homes = problems.homes.get(key.text)
        close = None if homes else nearest(key.text, self.fields)
        advice = f"keys here: {', '.join(sorted(self.fields))}"
        if homes:
            advice = f"{shown(key.text)} belongs in {either(homes)}; {advice}"
        elif close:
            advice = f"did you mean {shown(close)}? {advice}"
        problems.add(f"unknown key {shown(key.text)} in {name or self.title}", key.place, advice)
        return close

    def json_schema(self) -> JsonSchema:
        properties = {}
        for key, known in self.fields.items():
            properties[key] = {"description": known.summary, **known.type.json_schema()}
            if known.default is not None:
                properties[key]["default"] = known.default
        required = [key for key, known in self.fields.items() if known.required]
        return {
            "type": "object" if required else ["object", "null"],
            "additionalProperties": False,
            "properties": properties,
            **({"required": required} if required else {}),
        }

    def homes(self, name: str = "") -> dict[str, list[str]]:
        """Where each key of this record, and of the records below it, belongs."""
        found: dict[str, list[str]] = {}
        for key, known in self.fields.items():
            found.setdefault(key, []).append(name or self.title)
            if isinstance(known.type, SectionType):
                for inner, places in known.type.homes(f"{name}.{key}" if name else key).items():
                    found.setdefault(inner, []).extend(places)
        return found


@dataclass(frozen=True)
class OneOf(Type[Any]):
    """One type for a single value and another for a list."""

    single: Type[Any]
    several: Type[Any]
    wrap: bool = field(default=False)
    """Whether a single value is read as a list of one."""

    @property
    def expects(self) -> str:
        single = self.single.expects
        return single if " or " in single else f"{single} or {self.several.expects}"

    def read(self, node: Node, problems: Problems, name: str) -> Any:
        if isinstance(node, source.Sequence):
            return self.several.read(node, problems, name)
        if not isinstance(node, Scalar) or node.empty:
            return self.refuse(node, problems, name)
        value = self.single.read(node, problems, name)
        return (value,) if self.wrap and value is not None else value

    def json_schema(self) -> JsonSchema:
        return {"anyOf": [self.single.json_schema(), self.several.json_schema()]}


def describe(node: Node) -> str | None:
    """What stands there, for a message; None for nothing."""
    if isinstance(node, source.Sequence):
        return "a list"
    if isinstance(node, source.Mapping):
        return "keys with values"
    if not isinstance(node, Scalar) or node.empty:
        return None
    return shown(node.text) if node.plain else f"the text {shown(node.text)}"


def _plain(node: Node, pattern: str) -> str | None:
    """The text of an unquoted scalar that matches."""
    if isinstance(node, Scalar) and node.plain and re.fullmatch(pattern, node.text):
        return node.text
    return None


def _quote(node: Node) -> str:
    """The hint for text such as ``{rank}``, which YAML reads as keys with values."""
    if isinstance(node, source.Mapping) and len(node.entries) == 1:
        (entry,) = node.entries
        if isinstance(entry.value, Scalar) and entry.value.empty:
            return f'put it between quotes: "{{{entry.key.text}}}"'
    return ""


def _unquote(node: Node, pattern: str) -> str:
    """The hint for a value that only its quotes make wrong."""
    if isinstance(node, Scalar) and not node.plain and re.fullmatch(pattern, node.text):
        return "remove the quotes"
    return ""


def short(key: str) -> str:
    """A key as part of a name in a message."""
    return key if len(key) <= 40 else key[:39] + "…"
