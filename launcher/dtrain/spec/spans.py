"""The exact position of each part of a YAML document in its text, for editing in place."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import field
from typing import Any, NamedTuple

import yaml

from dtrain.records import dataclass

BREAK = re.compile("\r\n|[\n\r\x85\u2028\u2029]")
"""Line breaks of YAML 1.1, and so of PyYAML."""


class EntrySpan(NamedTuple):
    key: NodeSpan
    value: NodeSpan


@dataclass(slots=True)
class NodeSpan:
    """A scalar, an alias or a collection: ``text[start:end]``, with anchor and tag.

    A block collection ends with its last scalar, a block scalar after the blank lines that follow
    it.
    """

    start: int
    end: int
    anchor: str = ""
    alias: str = ""
    """The anchor that this alias refers to; empty if this is not an alias."""
    value: str = ""
    """The value of a scalar."""
    quote: str = ""
    """The first character of a scalar that is not plain: ``'``, ``"``, ``|`` or ``>``."""
    mapping: bool = False
    flow: bool = False
    """Whether a collection is written in braces or brackets."""
    children: list[NodeSpan] = field(default_factory=list)
    """The items of a sequence, or the keys and values of a mapping in turn."""

    @property
    def empty(self) -> bool:
        """Whether the node has no text, not even an anchor."""
        return self.start == self.end

    @property
    def entries(self) -> list[EntrySpan]:
        return [*map(EntrySpan, self.children[::2], self.children[1::2])]

    def entry(self, key: str) -> EntrySpan | None:
        """The entry of a key in the mapping itself, without merges."""
        return next((entry for entry in self.entries if entry.key.value == key), None)

    def walk(self) -> Iterator[NodeSpan]:
        """This part and everything in it."""
        yield self
        for child in self.children:
            yield from child.walk()


def parse(text: str) -> NodeSpan:
    """The document in ``text``, which must be valid for `dtrain.spec.source`, without a byte-order
    mark."""
    open_parts = [NodeSpan(0, len(text))]
    events: Iterator[Any] = yaml.parse(text, Loader=yaml.BaseLoader)
    for event in events:
        end: int = event.end_mark.index
        if isinstance(event, yaml.CollectionEndEvent):
            done = open_parts.pop()
            done.end = end if done.flow else done.children[-1].end
        elif isinstance(event, yaml.NodeEvent):
            part = _part(event)
            open_parts[-1].children.append(part)
            if isinstance(event, yaml.CollectionStartEvent):
                open_parts.append(part)
    return open_parts[0].children[0]


def _part(event: Any) -> NodeSpan:
    part = NodeSpan(event.start_mark.index, event.end_mark.index)
    if isinstance(event, yaml.AliasEvent):
        part.alias = event.anchor or ""
        return part
    part.anchor = event.anchor or ""
    if isinstance(event, yaml.ScalarEvent):
        part.value, part.quote = event.value, event.style or ""
    else:
        part.flow = bool(event.flow_style)
        part.mapping = isinstance(event, yaml.MappingStartEvent)
    return part


def line_start(text: str, index: int) -> int:
    """Where the line that holds ``index`` begins."""
    ends = [match.end() for match in BREAK.finditer(text, 0, index)]
    # index may fall inside "\r\n", but no part begins or ends there.
    return ends[-1] if ends else 0


def line_end(text: str, index: int) -> int:
    """Where the line that holds ``index`` ends, without its line break."""
    found = BREAK.search(text, index)
    return found.start() if found else len(text)


def next_line(text: str, index: int) -> int:
    """Where the line after the one that holds ``index`` begins, or the text ends."""
    found = BREAK.search(text, index)
    return found.end() if found else len(text)
