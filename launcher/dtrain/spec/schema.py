"""Types of lists and sections in configuration files, built from the types in `scalars`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from dtrain.records import dataclass
from dtrain.spec import source
from dtrain.spec.problems import Problems, TextSpan, nearest, shown
from dtrain.spec.scalars import Check, JsonSchema, T, Type
from dtrain.spec.source import Node, Scalar
from dtrain.spec.syntax import SPACE
from dtrain.wording import either

_LONG_FORMS = {"environment": "env"}
"""Keys that users write for a shorter one, too different for `nearest`."""
_JOINED = re.compile(r"([a-z_]+):\S")


@dataclass(frozen=True)
class ListOf(Type[tuple[T, ...]]):
    item: Type[T]
    unique: bool = False
    minimum: int = 0
    advice: str = ""
    """The hint if the value is not a list."""
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
                message = f"{name} lists {shown(str(value))} twice"
                problems.add_repeated(message, item.place, first[value].place)
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
    """Arbitrary keys, checked by ``key``, with values of one type."""

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
            full = f"{name}.{short(entry.key.text)}"
            if isinstance(entry.value, Scalar) and entry.value.null:
                problems.add(
                    f"{full} has no value", entry.value.place, "remove the key, or give it a value"
                )
                continue
            value = self.value.read(entry.value, problems, full)
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
    """One key of a section."""

    type: Type[Any]
    description: str
    """What the key does, in one or two sentences. Editors and `dtrain help KEY` show it."""
    required: bool = False
    unless: tuple[str, ...] = ()
    """Other keys of the record, beside which this key is not required."""
    default: Any = None
    """The default, if it is one value."""
    otherwise: str = ""
    """The default in words, if it is not one value."""
    example: str = ""
    """A value, as YAML."""
    only: str = ""
    """The framework that the key applies to; empty for a key that applies to all."""

    @property
    def summary(self) -> str:
        """The description, with a default in words and the framework."""
        default = f" Default: {self.otherwise}." if self.otherwise else ""
        return f"{self.description}{default}{f' For {self.only} only.' if self.only else ''}"


@dataclass(frozen=True)
class Section:
    """A section that was read: its valid values, and the positions of all its entries."""

    values: Mapping[str, Any]
    entries: Mapping[str, source.Entry]
    """By key, including entries with an invalid value."""
    head: TextSpan
    misspelled: frozenset[str | None] = frozenset()
    """The known keys that unknown keys of the file probably mean."""

    def __contains__(self, key: str) -> bool:
        """Whether the file has the key, with a valid or an invalid value."""
        return key in self.entries

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(key, default)

    def given(self, *keys: str) -> dict[str, Any]:
        """The valid values among ``keys``."""
        return {key: self.values[key] for key in keys if key in self.values}

    def sound(self, *keys: str) -> bool:
        """Whether each key is absent or was read without a problem."""
        return all(key in self.values for key in keys if key in self)

    def place(self, key: str) -> TextSpan:
        """The position of the key's value, or of the section's head if there is no such key."""
        return self.entries[key].value.place if key in self.entries else self.head

    def key_place(self, key: str) -> TextSpan:
        return self.entries[key].key.place if key in self.entries else self.head

    def texts(self, key: str) -> Iterator[Scalar]:
        """The texts at ``key`` as they are written, valid or not, without empty ones: one text, the
        items of a list, or the values of a section."""
        node = self.entries[key].value if key in self.entries else None
        children: Iterable[Node | None] = (node,)
        if isinstance(node, source.Sequence):
            children = node.items
        elif isinstance(node, source.Mapping):
            children = (entry.value for entry in node.entries)
        return (one for one in children if isinstance(one, Scalar) and not one.empty)

    def section(self, key: str) -> Section:
        """The section at ``key``; an empty one if there is none."""
        found = self.values.get(key)
        return found if isinstance(found, Section) else Section({}, {}, self.key_place(key))

    def build(self, key: str, kind: Callable[..., T]) -> T | None:
        """An object with the values of the section at ``key``; None if the file lacks the key."""
        return kind(**self.section(key).values) if key in self else None


@dataclass(frozen=True)
class SectionType(Type[Section]):
    """Known keys, each with its own type."""

    fields: Mapping[str, Field]
    title: str = ""
    """The name in messages of a section without a key: the whole file."""
    expects: str = "keys with values"

    def read(self, node: Node, problems: Problems, name: str) -> Section | None:
        if isinstance(node, Scalar) and node.empty:
            if needed := next((key for key, one in self.fields.items() if one.required), ""):
                hint = f"indent its keys below it, such as '{needed}:'"
                problems.add(f"{name} has no keys", node.place, hint)
                return None
            node = source.Mapping((), node.place, node.place)
        if not isinstance(node, source.Mapping):
            joined = isinstance(node, Scalar) and _JOINED.match(node.text)
            hint = SPACE if joined and joined[1] in self.fields else self._example(name)
            return self.refuse(node, problems, name or self.title, hint)
        prefix = f"{name}." if name else ""
        entries: dict[str, source.Entry] = {}
        values: dict[str, Any] = {}
        meant: set[str | None] = set()
        for entry in node.entries:
            key = entry.key.text
            known = self.fields.get(key)
            if known is None:
                meant.add(self.refuse_unknown(entry.key, problems, name))
                continue
            entries[key] = entry
            value = known.type.read(entry.value, problems, prefix + key)
            if value is not None:
                values[key] = value
        for key, known in self.fields.items():
            instead = any(other in entries for other in known.unless)
            if known.required and not instead and key not in entries and key not in meant:
                purpose = known.description[0].lower() + known.description[1:].rstrip(".")
                problems.add(f"{prefix}{key} is missing", node.head, f"add '{key}:', {purpose}")
        return Section(values, entries, node.head, frozenset(meant))

    def _example(self, name: str) -> str:
        """The hint for a section that is not written as one."""
        key, known = next(
            ((key, one) for key, one in self.fields.items() if one.example), ("", None)
        )
        if not name or known is None:
            return ""
        return f"write e.g. {name.rpartition('.')[2]}: {{{key}: {known.example}}}"

    def refuse_unknown(self, key: Scalar, problems: Problems, name: str) -> str | None:
        """Report an unknown key. Returns the key that the user probably means."""
        if problems.full:
            return None
        homes = problems.homes.get(key.text)
        meant = _LONG_FORMS.get(key.text, key.text)
        close = None if homes else nearest(meant, self.fields)
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
        needed = {key: known for key, known in self.fields.items() if known.required}
        required = [key for key, known in needed.items() if not known.unless]
        choices = [
            {"anyOf": [{"required": [one]} for one in (key, *known.unless)]}
            for key, known in needed.items()
            if known.unless
        ]
        return {
            "type": "object" if needed else ["object", "null"],
            "additionalProperties": False,
            "properties": properties,
            **({"required": required} if required else {}),
            **({"allOf": choices} if choices else {}),
        }

    def homes(self, name: str = "") -> dict[str, list[str]]:
        """The sections that each key of this section, and of the sections below it, belongs in."""
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
    wrap: bool = False
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


def short(key: str) -> str:
    """A key for a message, shortened to 40 characters."""
    return key if len(key) <= 40 else key[:39] + "…"
