"""A program's words: a list with an item for each, or one text."""

from __future__ import annotations

import re
import shlex

from dtrain.records import dataclass
from dtrain.spec import source
from dtrain.spec.problems import Problems, shown
from dtrain.spec.scalars import JsonSchema, Text, Type
from dtrain.spec.schema import ListOf
from dtrain.spec.source import Node, Scalar

_SYNTAX = re.compile(
    r"\\."
    r"|'[^']*'"
    r'|"(?:\\[^$`]|[^"\\$`])*(?:"|\\?(?P<quoted>[$`]))'
    r"|(?P<bare>[|&;<>()$`*?]|(?<!\S)[~#]|\n(?!\s*\Z))",
    re.DOTALL,
)
"""What a shell gives a meaning, in one of the two groups; quoted text is in none. Braces are for
placeholders."""


@dataclass(frozen=True)
class Words(Type[tuple[str, ...]]):
    """A text is split as a POSIX shell splits it. No shell runs, so what a shell would expand or
    carry out is refused, unless it is quoted."""

    item: Text
    minimum: int = 0

    @property
    def expects(self) -> str:
        return "text or a list"

    def read(self, node: Node, problems: Problems, name: str) -> tuple[str, ...] | None:
        if isinstance(node, source.Sequence) or (isinstance(node, Scalar) and node.empty):
            return self._list.read(node, problems, name)
        if not isinstance(node, Scalar):
            return self.refuse(node, problems, name)
        for found in _SYNTAX.finditer(node.text):
            if special := found["bare"] or found["quoted"]:
                problems.add(
                    f"{name}: a shell would interpret {shown(special)}, but none reads this text",
                    node.part(found.end() - 1),
                    "put it in single quotes to pass it on, or run a shell: [bash, -c, '…']",
                )
                return None
        try:
            words = shlex.split(node.text.replace("\\\n", ""))
        except ValueError:
            problems.add(
                f"{name}: a quote is not closed", node.place, "close it, or write a list of words"
            )
            return None
        items = tuple(Scalar(word, False, node.place) for word in words)
        return self._list.read(source.Sequence(items, node.place), problems, name)

    @property
    def _list(self) -> ListOf[str]:
        return ListOf(self.item, minimum=self.minimum)

    def json_schema(self) -> JsonSchema:
        text = {"type": ["string", "number", "boolean"]}
        return {"anyOf": [text, self._list.json_schema()]}
