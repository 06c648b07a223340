"""What PyYAML says about malformed text, said for someone who does not know YAML's grammar."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import yaml

from dtrain.spec.problems import shown


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with the text; line and column count from 0."""

    message: str
    line: int
    column: int
    hint: str = ""


def explain(error: yaml.MarkedYAMLError, lines: Sequence[str]) -> Fault:
    """The fault that stopped PyYAML in a text of these lines."""
    problem, context = error.problem or "", error.context or ""
    stopped = error.problem_mark or error.context_mark
    started = error.context_mark or stopped
    if stopped is None or started is None:
        return Fault(f"this is not valid YAML: {problem}", 0, 0)
    line, column = stopped.line, stopped.column
    refused = re.search(r"found character '(.+)' that cannot start", problem)
    if refused and refused[1] == r"\t":
        return Fault("a tab cannot stand here", line, column, "use spaces instead of tabs")
    if refused:
        character = refused[1].replace("\\\\", "\\")
        hint = "put the value between quotes"
        return Fault(f"a value cannot start with {shown(character)}", line, column, hint)
    if "mapping values are not allowed" in problem:
        return _colon(line, column, lines)
    bracket = re.search(r"flow (sequence|mapping): expected", f"{context}: {problem}")
    if bracket:
        opening, closing = ("[", "]") if bracket[1] == "sequence" else ("{", "}")
        hint = f"the '{opening}' is on line {started.line + 1}"
        if problem.endswith("got '['"):
            hint += "; put text that holds '[' between quotes: \"gpu[01-08]\""
        if problem.endswith("got '{'"):
            hint += "; put text that holds '{' between quotes: \"--rank={rank}\""
        return Fault(f"a ',' or '{closing}' is missing", line, column, hint)
    for pattern, message, at_start, hint in _SAYINGS:
        if re.search(pattern, f"{context}: {problem}"):
            place = started if at_start else stopped
            return Fault(message, place.line, place.column, hint)
    return Fault(f"this is not valid YAML: {problem}", line, column)


def _colon(line: int, column: int, lines: Sequence[str]) -> Fault:
    """A ':' too many, be it that a value holds one, or that the line above lacks its own."""
    message = "a ':' does not fit here"
    if re.search(r":\s", lines[line][:column]):
        return Fault(message, line, column, "put a value that holds ': ' between quotes")
    above = next((n for n in range(line - 1, -1, -1) if lines[n].strip()), None)
    if above is not None and not re.search(r":(\s|$)", lines[above]):
        return Fault(
            "this line is no 'key: value'",
            above,
            len(lines[above]) - len(lines[above].lstrip()),
            "put ': ', with a space behind the colon, between a key and its value",
        )
    return Fault(message, line, column, "start the keys of one group in the same column")


_QUOTE = "put text that starts with {} between quotes"
_BACKSLASH = "between single quotes, backslashes stand for themselves"
# Pattern over "context: problem", message, whether it points at where the construct started, hint.
_SAYINGS = [
    (
        "could not find expected ':'",
        "this line is no 'key: value'",
        True,
        "put ': ', with a space behind the colon, between a key and its value",
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
        _QUOTE.format("'*'") + ": '*.pt'",
    ),
    (
        "scanning an anchor",
        "'&' starts a YAML anchor, and this is none",
        True,
        _QUOTE.format("'&'"),
    ),
    (
        "(scanning|parsing) a tag|undefined tag handle",
        "'!' starts a YAML tag, and this is none",
        True,
        _QUOTE.format("'!'"),
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
        _BACKSLASH,
    ),
    ("escape sequence of", "a backslash sequence is cut short", False, _BACKSLASH),
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
        "close every bracket; put text that starts with a sign such as , [ ] { } between quotes",
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
        _QUOTE.format("'%'"),
    ),
]
