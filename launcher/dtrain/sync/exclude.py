"""Which paths of the working folder stay at home: a documented subset of gitignore's patterns.

    *.pt          a file or folder of that name, at any depth
    data/         a folder of that name, at any depth, with all it holds
    /top, a/b     a slash at the start or inside ties the pattern to the working folder itself
    **/x, a/**    ``**`` stands for any number of folders
    * ? [a-z]     match within one name; ``[!a]`` negates, a backslash takes the next as it is
    !keep.pt      takes an earlier pattern back; the last pattern that matches decides

As with git, what is inside an excluded folder cannot be taken back: the folder is never read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Rule:
    expression: re.Pattern[str]
    keeps: bool
    folders_only: bool


class Exclusion:
    """Answers for one list of patterns."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._rules = [_rule(pattern) for pattern in patterns if pattern.strip("/!")]

    def covers(self, path: str, *, folder: bool) -> bool:
        """Whether ``path`` (relative, with ``/`` between names) is excluded.

        Its parents are taken to be included: whoever walks the tree asks about them first.
        """
        for rule in reversed(self._rules):
            if (folder or not rule.folders_only) and rule.expression.fullmatch(path):
                return not rule.keeps
        return False


def _rule(pattern: str) -> _Rule:
    keeps = pattern.startswith("!")
    body = pattern[1:] if keeps else pattern
    folders_only = body.endswith("/")
    body = body.rstrip("/")
    anchored = "/" in body
    parts = [part for part in body.split("/") if part not in ("", ".")]
    if not anchored:
        parts.insert(0, "**")
    return _Rule(re.compile(_expression(parts), re.DOTALL), keeps, folders_only)


def _expression(parts: Sequence[str]) -> str:
    text = ""
    for at, part in enumerate(parts):
        last = at == len(parts) - 1
        if part == "**":
            text += ".+" if last else "(?:[^/]+/)*"
        else:
            text += _name(part) + ("" if last else "/")
    return text


def _name(glob: str) -> str:
    """The expression for one name with wildcards."""
    text, at = "", 0
    while at < len(glob):
        char = glob[at]
        at += 1
        if char == "*":
            text += "[^/]*"
        elif char == "?":
            text += "[^/]"
        elif char == "\\" and at < len(glob):
            text += re.escape(glob[at])
            at += 1
        elif char == "[" and (end := _class_end(glob, at)) > 0:
            text += _character_class(glob[at:end])
            at = end + 1
        else:
            text += re.escape(char)
    return text


def _class_end(glob: str, at: int) -> int:
    """Where the class whose first character is at ``at`` closes; not positive if it does not."""
    return glob.find("]", at + 2 if glob[at : at + 1] in ("!", "^") else at + 1)


def _character_class(body: str) -> str:
    negated = body[0] in "!^"
    body = body[1:] if negated else body
    # Everything but the range's dash is literal; a range turned around is no range.
    literal = re.sub(r"[\\\[\]^&~|]", r"\\\g<0>", body)
    expression = f"(?!/)[{'^' if negated else ''}{literal}]"
    try:
        re.compile(expression)
    except re.error:
        return re.escape(f"[{body}]")
    return expression
