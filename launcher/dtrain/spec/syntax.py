"""What PyYAML says about malformed text, said for someone who does not know YAML's grammar."""

from __future__ import annotations

import re
from typing import Any

import yaml

from dtrain.spec.problems import shown


def explain(error: yaml.MarkedYAMLError) -> tuple[str, Any, str]:
    """The message, the mark (PyYAML's, counted from 0, or None) and the hint for an error."""
    problem, context = error.problem or "", error.context or ""
    start = error.context_mark or error.problem_mark
    opened = f"it was opened on line {start.line + 1}" if start else ""
    found = re.search(r"found character '(.+)' that cannot start", problem)
    if found and found[1] == r"\t":
        return "a tab cannot indent", error.problem_mark, "YAML indents with spaces"
    if found:
        character = found[1].replace("\\\\", "\\")
        return (
            f"a value cannot start with {shown(character)}",
            error.problem_mark,
            "put the value between quotes",
        )
    for pattern, message, at_start, hint in _SAYINGS:
        if re.search(pattern, f"{context}: {problem}"):
            return (
                message,
                start if at_start else error.problem_mark,
                hint.replace("{opened}", opened),
            )
    return f"this is not valid YAML: {problem}", error.problem_mark or start, ""


# Pattern over "context: problem", message, whether it points at where the construct started, hint.
_SAYINGS = [
    (
        "mapping values are not allowed",
        "a ':' does not fit here",
        False,
        "put a value that holds ': ' between quotes; indent this line like its neighbors",
    ),
    (
        "could not find expected ':'",
        "a ':' is missing after this key",
        True,
        "write 'key: value', with a space after the colon",
    ),
    (
        "sequence entries are not allowed",
        "a list item ('- ') does not fit here",
        False,
        "start the list on its own line below the key",
    ),
    (
        "scanning an alias",
        "'*' starts a YAML alias, and this is none",
        True,
        "put text that starts with '*' between quotes: '*.pt'",
    ),
    (
        "scanning an anchor",
        "'&' starts a YAML anchor, and this is none",
        True,
        "put text that starts with '&' between quotes",
    ),
    (
        "(scanning|parsing) a tag|undefined tag handle",
        "'!' starts a YAML tag, and this is none",
        True,
        "put text that starts with '!' between quotes",
    ),
    (
        "quoted scalar: found unexpected",
        "the quote that opens here is never closed",
        True,
        "add the closing quote",
    ),
    (
        "unknown escape character",
        "a backslash sequence that YAML does not know",
        False,
        "between single quotes, backslashes stand for themselves",
    ),
    (
        "escape sequence of",
        "a backslash sequence is cut short",
        False,
        "between single quotes, backslashes stand for themselves",
    ),
    ("flow sequence: expected", "a ',' or ']' is missing in the list", False, "{opened}"),
    ("flow mapping: expected", "a ',' or '}' is missing", False, "{opened}"),
    (
        "expected <block end>",
        "this does not fit what is above it",
        False,
        "start the keys of one group in the same column; close every quote and bracket",
    ),
    (
        "expected the node content",
        "a value is missing here",
        False,
        "close every bracket, and quote text that starts with one of , [ ] { } # & * ! | > % @",
    ),
    (
        "expected '<document start>'",
        "this does not belong to the value before it",
        False,
        "everything in a cluster file stands under a key",
    ),
    (
        "scanning a block scalar",
        "'|' and '>' start text on the lines below",
        True,
        "end this line here, or put the text between quotes",
    ),
    (
        "directive|YAML document",
        "'%' starts a YAML directive, and this is none",
        True,
        "put text that starts with '%' between quotes",
    ),
]
