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
    for pattern, (at_start, message, hint) in _EXPLANATIONS.items():
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


_Explanation = tuple[bool, str, str]
"""Whether to point at the start of the construct, the message, and the hint."""


def _no_valid(what: str, mark: str, example: str = "") -> _Explanation:
    """Of a construct of YAML that starts with ``mark``."""
    message = f"'{mark}' starts a YAML {what}, but this is not a valid {what}"
    return True, message, f"put text that starts with '{mark}' in quotes{example}"


_BACKSLASH = "use single quotes, in which a backslash is an ordinary character"
_EXPLANATIONS: dict[str, _Explanation] = {
    "could not find expected ':'": (True, "this line is not 'key: value'", SPACE),
    "sequence entries are not allowed": (
        False, "unexpected list item ('- ')", "start the list on its own line below the key",
    ),
    "scanning an alias": _no_valid("alias", "*", ": '*.pt'"),
    "scanning an anchor": _no_valid("anchor", "&"),
    "(scanning|parsing) a tag|undefined tag handle": _no_valid("tag", "!"),
    "quoted scalar: found unexpected": (
        True, "this quote is never closed", "add the closing quote",
    ),
    "unknown escape character": (False, "unknown escape sequence", _BACKSLASH),
    "escape sequence of": (False, "incomplete escape sequence", _BACKSLASH),
    "expected <block end>": (
        False, "this does not match the indentation or the structure above it",
        "start the keys of one group in the same column; close every quote and bracket",
    ),
    "expected the node content": (
        False, "a value is missing here",
        "close every bracket; put text that starts with a character such as , [ ] { } in quotes",
    ),
    "expected '<document start>'": (
        False, "unexpected text after the value above it",
        "put every value in a cluster file under a key",
    ),
    "scanning a block scalar": (
        True, "'|' and '>' start text on the lines below",
        "end this line here, or put the text in quotes",
    ),
    "directive|YAML document": _no_valid("directive", "%"),
}  # fmt: skip
"""By the pattern of "context: problem"; the first that is found counts."""
