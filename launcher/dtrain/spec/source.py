"""Read YAML text into a tree of nodes with positions.

This module does not guess types: a scalar keeps its text and whether it was quoted, and the
schema decides its type. It builds the tree from PyYAML's events without recursion, and limits the
depth and the size after alias expansion, so a hostile file costs little.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import field
from typing import Any, NoReturn

import yaml

from dtrain.records import dataclass
from dtrain.spec.problems import Problems, TextSpan, shown, visible
from dtrain.spec.spans import BREAK
from dtrain.spec.syntax import explain

MAX_SIZE = 1 << 20
"""In bytes, or in characters if the text is already decoded."""
MOST_FORBIDDEN = 9
"""Characters that YAML does not allow. A text with more is probably none."""
MAX_DEPTH = 32
MAX_NODES = 50_000
"""Keys and values after alias expansion: three for each host of the largest allowed cluster. A long
text counts once more for each `LONG` characters: aliases repeat it, too."""
LONG = 256

_NULL = ("null", "Null", "NULL", "~")
_UNUSABLE = re.compile("[\0\ud800-\udfff]")
_KNOWN_TAGS = frozenset(f"tag:yaml.org,2002:{kind}" for kind in ("str", "seq", "map")) | {"!"}


@dataclass(frozen=True, slots=True)
class Scalar:
    text: str
    plain: bool
    """Whether it is written without quotes and not as a block scalar."""
    place: TextSpan
    inner: int | None = None
    """Column at which ``text`` starts; None if the file spells it differently, e.g. escaped."""

    @property
    def empty(self) -> bool:
        """Whether the value is missing."""
        return self.plain and not self.text

    @property
    def null(self) -> bool:
        """Whether YAML reads the value as null."""
        return self.plain and self.text in _NULL

    def part(self, offset: int, width: int = 1) -> TextSpan:
        """The position of ``width`` characters of ``text``, from ``offset``."""
        if self.inner is None:
            return self.place
        return TextSpan(self.place.line, self.inner + offset, width)


@dataclass(frozen=True, slots=True)
class Sequence:
    items: tuple[Node, ...]
    place: TextSpan


@dataclass(frozen=True, slots=True)
class Entry:
    key: Scalar
    value: Node


@dataclass(frozen=True, slots=True)
class Mapping:
    entries: tuple[Entry, ...]
    """In file order, keys unique, ``<<`` merged in."""
    place: TextSpan
    head: TextSpan
    """The key that the mapping belongs to, if it has one."""


@dataclass(frozen=True, slots=True)
class Broken:
    """A value with a problem that is already reported; types skip it."""

    place: TextSpan


Node = Scalar | Sequence | Mapping | Broken


class _UnreadableError(Exception):
    """The rest of the text cannot be read. The problem is already added."""


@dataclass(slots=True)
class _Open:
    """A collection that is still being read."""

    event: Any
    head: TextSpan
    key: Scalar | None = None
    awaits_value: bool = False
    items: list[Node] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    size: int = 1


def compose(source: str | bytes, file: str, settings: Iterable[str] = ()) -> tuple[Node, Problems]:
    """Read one YAML document. ``file`` is its name in positions, and ``settings`` are lines of
    further values, for `compose_value`.

    Returns the tree and the problems so far; the schema adds more.
    Raises SpecError if the text is not one valid YAML document: not UTF-8, too large, too deep,
    malformed or empty.
    """
    text = _decoded(source, file)
    lines = BREAK.split(text)
    problems = Problems(file, lines, settings)
    try:
        root = _Builder(text, lines, problems).document()
    except _UnreadableError:
        raise problems.error() from None
    if root is None:
        problems.add(
            "the file is empty",
            TextSpan(1, 1),
            "`dtrain init` writes one; `dtrain help cluster-file` describes it",
        )
        raise problems.error()
    return root, problems


def compose_value(text: str, place: TextSpan, problems: Problems) -> Node:
    """Read one YAML value, a line, that starts at ``place`` in the lines of ``problems``. Problems
    go there, and a value that cannot be read is `Broken`."""
    if _refuse_forbidden([text], place, problems):
        return Broken(place)
    line = problems.lines[place.line - 1]
    before = " " * (place.column - 1)  # blanks give the value its column
    try:
        value = _Builder(before + text, [line], problems, above=place.line - 1).document()
    except _UnreadableError:
        return Broken(place)
    return Scalar("", True, place) if value is None else value


def _decoded(source: str | bytes, file: str) -> str:
    """The text, without a leading byte-order mark. Raises SpecError."""
    problems, begin = Problems(file, [""]), TextSpan(1, 1)
    if len(source) > MAX_SIZE:
        large = f"the file is larger than {MAX_SIZE >> 10} KiB"
        problems.add(large, begin, "a cluster file is a few kilobytes; is this the right file?")
    elif file.endswith(".py"):
        program = f"`dtrain init --script {shlex.quote(file)}` writes a cluster file that runs it"
        problems.add("this is a Python program, not a cluster file", begin, program)
    elif source[:2] in (b"\xff\xfe", b"\xfe\xff"):
        problems.add("the file is UTF-16 text", begin, "save it as UTF-8")
    problems.raise_if_any()
    if isinstance(source, bytes):
        source = source.decode("utf-8", "surrogateescape")
    text = source.removeprefix("\ufeff")
    forbidden = sum(1 for _ in _forbidden(text))
    if forbidden > MOST_FORBIDDEN:
        binary = f"this is not text: YAML does not allow {forbidden} of its characters"
        problems.add(binary, begin, "is this the right file? If it is, save it as UTF-8")
    elif forbidden:
        lines = BREAK.split(text)
        problems = Problems(file, lines)
        _refuse_forbidden(lines, begin, problems)
    problems.raise_if_any()
    return text


def _refuse_forbidden(lines: Iterable[str], begin: TextSpan, problems: Problems) -> bool:
    """Report the forbidden characters of lines, the first of which starts at ``begin``. Returns
    whether there is one."""
    found = False
    before = begin.column - 1
    for number, line in enumerate(lines, begin.line):
        for column in _forbidden(line):
            found = True
            place = TextSpan(number, before + column)
            code = ord(line[column - 1])
            if 0xDC80 <= code <= 0xDCFF:
                problems.add(
                    f"the byte 0x{code - 0xDC00:02x} is not UTF-8", place, "save it as UTF-8"
                )
            else:
                problems.add(
                    f"the character {visible(chr(code))} is not allowed in YAML",
                    place,
                    "delete it, or write it as an escape in double quotes",
                )
        before = 0
    return found


def _forbidden(text: str) -> Iterator[int]:
    """The columns, from 1, of characters that YAML does not allow there."""
    # PyYAML also allows a byte-order mark after the start.
    for match in yaml.reader.Reader.NON_PRINTABLE.finditer(text.replace("\ufeff", "\0")):
        yield match.start() + 1


class _Builder:
    """Builds the tree from events. For one document."""

    def __init__(self, text: str, lines: list[str], problems: Problems, above: int = 0) -> None:
        """``above``: the number of lines of ``problems`` above those of this text."""
        self._text = text
        self._lines = lines
        self._above = above
        self._problems = problems
        self._open: list[_Open] = []
        self._anchors: dict[str, tuple[Node, int]] = {}
        self._root: Node | None = None

    def document(self) -> Node | None:
        """The document's tree; None for an empty text. Raises _UnreadableError."""
        for event in self._events():
            match event:
                case yaml.DocumentStartEvent() if self._root is not None:
                    self._stop(
                        "a second document starts here",
                        self._place(event),
                        "a cluster file is one document; remove the '---' and the rest",
                    )
                case yaml.ScalarEvent():
                    self._complete(event, self._scalar(event), 1 + len(event.value) // LONG)
                case yaml.AliasEvent():
                    self._alias(event)
                case yaml.SequenceStartEvent() | yaml.MappingStartEvent():
                    self._enter(event)
                case yaml.SequenceEndEvent() | yaml.MappingEndEvent():
                    self._leave(event)
        return self._root

    def _events(self) -> Iterator[Any]:
        loader = yaml.BaseLoader(self._text)
        try:
            while loader.check_event():
                yield loader.get_event()  # type: ignore[no-untyped-call]
        except yaml.MarkedYAMLError as error:
            fault = explain(error, self._lines)
            self._stop(fault.message, self._within(fault.line, fault.column), fault.hint)
        except (yaml.YAMLError, ValueError, OverflowError):
            # PyYAML does not catch overflows of numbers in %YAML lines and \U escapes.
            self._stop(
                "this is not valid YAML",
                self._within(loader.line, loader.column),
                "check the escape or directive here",
            )

    def _enter(self, event: Any) -> None:
        if len(self._open) >= MAX_DEPTH:
            self._stop(
                f"values are nested more than {MAX_DEPTH} deep",
                self._place(event),
                "a cluster file needs at most five levels",
            )
        parent = self._open[-1] if self._open else None
        place = self._place(event)
        head = parent.key.place if parent and parent.key else place
        self._open.append(_Open(event, head))

    def _leave(self, end: Any) -> None:
        done = self._open.pop()
        place = self._place(done.event, end)
        node: Node
        if isinstance(done.event, yaml.SequenceStartEvent):
            node = Sequence(tuple(done.items), place)
        else:
            node = Mapping(self._merged(done.entries), place, done.head)
        self._complete(done.event, node, done.size)

    def _alias(self, event: Any) -> None:
        place = self._place(event)
        known = self._anchors.get(event.anchor)
        if any(collection.event.anchor == event.anchor for collection in self._open):
            self._stop(f"the alias {shown('*' + event.anchor)} refers to itself", place)
        if known is None:
            self._problems.add(
                f"the alias {shown('*' + event.anchor)} has no anchor",
                place,
                f"if you mean text that starts with '*', quote it: {shown('*' + event.anchor)}",
            )
            known = (Broken(place), 1)
        self._add(*known)

    def _complete(self, event: Any, node: Node, size: int) -> None:
        """Add a node that started with ``event``; check its tag and register its anchor."""
        if event.tag is not None and event.tag not in _KNOWN_TAGS:
            place = self._within(event.start_mark.line, event.start_mark.column)
            self._problems.add(
                f"the tag {shown(event.tag.replace('tag:yaml.org,2002:', '!!'))} is not supported",
                place,
                "remove it; the key decides the type of the value",
            )
            node = Broken(place)
        if event.anchor is not None:
            self._anchors[event.anchor] = (node, size)
        self._add(node, size)

    def _add(self, node: Node, size: int) -> None:
        parent = self._open[-1] if self._open else None
        if parent is None:
            self._root = node
            return
        parent.size += size
        if parent.size > MAX_NODES:
            self._stop(
                f"the file has more than {MAX_NODES} values after alias expansion",
                node.place,
                "a cluster file has a few hundred values; shorten hosts with brackets: gpu[01-99]",
            )
        if isinstance(parent.event, yaml.SequenceStartEvent):
            parent.items.append(node)
        elif not parent.awaits_value:
            parent.awaits_value = True
            parent.key = self._key(node)
        else:
            parent.awaits_value = False
            if parent.key:
                parent.entries.append(Entry(parent.key, node))
                parent.key = None

    def _key(self, node: Node) -> Scalar | None:
        if isinstance(node, Broken):
            return None
        if not isinstance(node, Scalar):
            self._problems.add("a key must be text", node.place)
            return None
        if node.empty:
            self._problems.add("a key is missing before ':'", node.place)
            return None
        return node

    def _merged(self, entries: list[Entry]) -> tuple[Entry, ...]:
        """The entries without repeated keys, and with the entries that ``<<`` merges in."""
        own: dict[str, Entry] = {}
        brought: dict[str, Entry] = {}
        for entry in entries:
            key = entry.key
            if key.text == "<<" and key.plain:
                sources = entry.value.items if isinstance(entry.value, Sequence) else (entry.value,)
                for source in sources:
                    if isinstance(source, Mapping):
                        for merged in source.entries:
                            brought.setdefault(merged.key.text, merged)
                    elif not isinstance(source, Broken):
                        self._problems.add(
                            "'<<' merges keys and values, or a list of them", source.place
                        )
            elif key.text in own:
                message = f"the key {shown(key.text)} is given twice"
                self._problems.add_repeated(message, key.place, own[key.text].key.place)
            else:
                own[key.text] = entry
        return (*own.values(), *(brought[text] for text in brought if text not in own))

    def _scalar(self, event: Any) -> Scalar:
        place = self._place(event)
        plain = event.style is None
        if not event.value and plain:
            # An empty value has no position of its own: point at its key.
            key = self._open[-1].key if self._open else None
            return Scalar("", True, key.place if key else place)
        found = _UNUSABLE.search(event.value)
        if found:
            self._problems.add(
                f"the character {visible(found[0])} cannot be passed to a program",
                place,
                "remove it",
            )
        start = place.column - 1 + (0 if plain else 1)
        line = self._lines[place.line - self._above - 1]
        verbatim = line[start : start + len(event.value)] == event.value
        return Scalar(event.value, plain, place, start + 1 if verbatim else None)

    def _place(self, event: Any, end: Any = None) -> TextSpan:
        start, stop = event.start_mark, (end or event).end_mark
        place = self._within(start.line, start.column)
        number = place.line - self._above - 1
        line = self._lines[number] if number < len(self._lines) else ""
        last = stop.column if stop.line == start.line else len(line.rstrip())
        return TextSpan(place.line, place.column, max(last - start.column, 1))

    def _within(self, line: int, column: int) -> TextSpan:
        """The position of a mark (counted from 0), but not beyond the end of the text."""
        if line >= len(self._lines) or (line == len(self._lines) - 1 and not self._lines[line]):
            line = max((n for n, text in enumerate(self._lines) if text.strip()), default=0)
            column = len(self._lines[line].rstrip())
        return TextSpan(self._above + line + 1, column + 1)

    def _stop(self, message: str, place: TextSpan, hint: str = "") -> NoReturn:
        self._problems.add(message, place, hint)
        raise _UnreadableError
