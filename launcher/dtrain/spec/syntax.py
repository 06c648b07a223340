"""Turn PyYAML's errors into messages for users who do not know the grammar of YAML."""

from __future__ import annotations

import re
from collections.abc import Sequence

import yaml

from dtrain.records import dataclass
from dtrain.spec.problems import shown

SPACE = "write ': ', with a space after the colon, between a key and its value"


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
        return Fault("YAML does not allow a tab here", line, column, "use spaces instead of tabs")
    if refused:
        character = refused[1].replace("\\\\", "\\")
        hint = "put the value in quotes"
        return Fault(f"a value cannot start with {shown(character)}", line, column, hint)
    if "mapping values are not allowed" in problem:
        return _colon(line, column, lines)
    bracket = re.search(r"flow (sequence|mapping): expected", f"{context}: {problem}")
    if bracket:
        opening, closing = ("[", "]") if bracket[1] == "sequence" else ("{", "}")
        where = "on this line" if started.line == line else f"on line {started.line + 1}"
        hint = f"the '{opening}' is {where}"
        if problem.endswith("got '['"):
            hint += "; put text that contains '[' in quotes: \"gpu[01-08]\""
        if problem.endswith("got '{'"):
            hint += "; put text that contains '{' in quotes: \"--rank={rank}\""
        return Fault(f"a ',' or '{closing}' is missing", line, column, hint)
    for pattern, message, at_start, hint in _EXPLANATIONS:
        if re.search(pattern, f"{context}: {problem}"):
            place = started if at_start else stopped
            return Fault(message, place.line, place.column, hint)
    return Fault(f"this is not valid YAML: {problem}", line, column)


def _colon(line: int, column: int, lines: Sequence[str]) -> Fault:
    """An unexpected ':': a value contains one, or the line above has none."""
    message = "unexpected ':'"
    if re.search(r":\s", lines[line][:column]):
        return Fault(message, line, column, "put a value that contains ': ' in quotes")
    above = next((n for n in range(line - 1, -1, -1) if lines[n].strip()), None)
    if above is not None and not re.search(r":(\s|$)", lines[above]):
        return Fault(
            "this line is not 'key: value'",
            above,
            len(lines[above]) - len(lines[above].lstrip()),
            SPACE,
        )
    return Fault(message, line, column, "start the keys of one group in the same column")


_QUOTE = "put text that starts with {} in quotes"
_BACKSLASH = "use single quotes, in which a backslash is an ordinary character"
# Pattern for "context: problem", message, whether to point at the start of the construct, hint.
_EXPLANATIONS = [
    (
        "could not find expected ':'",
        "this line is not 'key: value'",
        True,
        SPACE,
    ),
    (
        "sequence entries are not allowed",
        "unexpected list item ('- ')",
        False,
        "start the list on its own line below the key",
    ),
    (
        "scanning an alias",
        "'*' starts a YAML alias, but this is not a valid alias",
        True,
        _QUOTE.format("'*'") + ": '*.pt'",
    ),
    (
        "scanning an anchor",
        "'&' starts a YAML anchor, but this is not a valid anchor",
        True,
        _QUOTE.format("'&'"),
    ),
    (
        "(scanning|parsing) a tag|undefined tag handle",
        "'!' starts a YAML tag, but this is not a valid tag",
        True,
        _QUOTE.format("'!'"),
    ),
    (
        "quoted scalar: found unexpected",
        "this quote is never closed",
        True,
        "add the closing quote",
    ),
    (
        "unknown escape character",
        "unknown escape sequence",
        False,
        _BACKSLASH,
    ),
    ("escape sequence of", "incomplete escape sequence", False, _BACKSLASH),
    (
        "expected <block end>",
        "this does not match the indentation or the structure above it",
        False,
        "start the keys of one group in the same column; close every quote and bracket",
    ),
    (
        "expected the node content",
        "a value is missing here",
        False,
        "close every bracket; put text that starts with a character such as , [ ] { } in quotes",
    ),
    (
        "expected '<document start>'",
        "unexpected text after the value above it",
        False,
        "put every value in a cluster file under a key",
    ),
    (
        "scanning a block scalar",
        "'|' and '>' start text on the lines below",
        True,
        "end this line here, or put the text in quotes",
    ),
    (
        "directive|YAML document",
        "'%' starts a YAML directive, but this is not a valid directive",
        True,
        _QUOTE.format("'%'"),
    ),
]
