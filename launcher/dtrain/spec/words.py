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
_QUOTED = re.compile(r"""'[^']*'|"(?:\\.|[^"\\])*"|\\.""", re.DOTALL)
_ESCAPED = re.compile(r"\\.", re.DOTALL)
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")


@dataclass(frozen=True)
class Words(Type[tuple[str, ...]]):
    """A text is split as a POSIX shell splits it. No shell runs, so what a shell would expand or
    carry out is refused, unless it is quoted."""

    item: Text
    program: bool = False
    """Whether the first word is a program, and not missing."""

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
                    f"{name}: {shown(special)} has a meaning only in a shell, and dtrain runs none",
                    node.part(found.end() - 1),
                    "put it in single quotes to pass it on, or run a shell: [bash, -c, '…']",
                )
                return None
        try:
            words = shlex.split(_one_line(node.text))
        except ValueError as error:
            fault = "ends with \\" if "escaped" in str(error) else "has a quote that is not closed"
            problems.add(f"{name} {fault}", node.place, "complete it, or write a list of words")
            return None
        if self.program and words and _ASSIGNMENT.match(words[0]):
            problems.add(
                f"{name}: {shown(words[0])} is a variable, and dtrain runs no shell that sets it",
                node.place,
                "set variables in job.env, or run a shell: [bash, -c, '…']",
            )
            return None
        items = tuple(Scalar(word, False, node.place) for word in words)
        return self._list.read(source.Sequence(items, node.place), problems, name)

    @property
    def _list(self) -> ListOf[str]:
        return ListOf(self.item, minimum=int(self.program))

    def json_schema(self) -> JsonSchema:
        text = {"type": ["string", "number", "boolean"]}
        return {"anyOf": [text, self._list.json_schema()]}


def _one_line(text: str) -> str:
    """The text without the line breaks that a backslash removes in a shell, unlike shlex."""

    def joined(found: re.Match[str]) -> str:
        if found[0].startswith("'"):
            return found[0]
        return _ESCAPED.sub(lambda pair: "" if pair[0] == "\\\n" else pair[0], found[0])

    return _QUOTED.sub(joined, text)
