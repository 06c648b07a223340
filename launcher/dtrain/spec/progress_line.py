"""The lines in which a program prints its progress: ``job.progress.line``. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

_PLACE = re.compile(r"\{([A-Za-z_][A-Za-z0-9_/]{0,63})\}")
_COUNTS = ("step", "total")
_COUNT = r"\s*([0-9][0-9,_]*)"
_NUMBER = r"\s*([-+]?(?:[0-9][0-9,_]*\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?(?i:nan|inf))"
_SPACE = re.compile(r"(\s+)")
NEEDS_STEP = "needs {step}, such as step {step} * loss {loss}"
"""The end of a sentence about lines without a step."""
MOST = 32
"""Numbers in all lines: `dtrain.runtime.progress` takes no more."""
TOO_MANY = f"has more than {MOST} numbers"


class PrintedLine:
    """A pattern such as ``step {step}/{total} * loss {loss}``.

    ``{name}`` stands for a number, ``*`` for any text, and a space for one or more spaces. Raises
    ValueError, with the end of a sentence, for a pattern that cannot be used.
    """

    def __init__(self, pattern: str) -> None:
        names = _PLACE.findall(pattern)
        if not names:
            raise ValueError("has no number, such as {step}")
        twice = next((name for name in names if names.count(name) > 1), "")
        if twice:
            raise ValueError(f"has {{{twice}}} twice")
        if touching := re.search(_PLACE.pattern * 2, pattern):
            raise ValueError(f"has nothing between the numbers {touching[0]}")
        if len(names) > MOST:
            raise ValueError(TOO_MANY)
        self._names = names
        # Each part is sought after the one before, so a pattern of many parts tries no combinations
        # of places, whatever the program prints.
        self._parts = [_expression(part) for part in pattern.split("*") if part.strip()]

    def read(self, line: str) -> dict[str, int | float] | None:
        """The numbers in a line, by name. None if the pattern does not match it."""
        at = 0
        texts: list[str] = []
        for part in self._parts:
            found = part.search(line, at)
            if found is None:
                return None
            at = found.end()
            texts += found.groups()
        return {
            name: (int if name in _COUNTS else float)(text.replace(",", "").replace("_", ""))
            for name, text in zip(self._names, texts, strict=True)
        }


def numbers(lines: Iterable[str]) -> set[str]:
    """The names in patterns."""
    return {name for line in lines for name in _PLACE.findall(line)}


def fault(pattern: str) -> str:
    """What is wrong with a pattern, as the end of a sentence; empty if it can be used."""
    try:
        PrintedLine(pattern)
    except ValueError as error:
        return str(error)
    return ""


def _expression(part: str) -> re.Pattern[str]:
    pieces = []
    # A split by a pattern with one group returns texts and groups in turn.
    for number, piece in enumerate(_PLACE.split(part)):
        if number % 2:
            pieces.append(_COUNT if piece in _COUNTS else _NUMBER)
        else:
            pieces += [r"\s+" if _SPACE.fullmatch(one) else re.escape(one)
                       for one in _SPACE.split(piece) if one]  # fmt: skip
    # `loss: {loss}` also matches `loss:4.2`: the number takes the spaces before it. Between two
    # numbers, `{step} {loss}`, is a space: else it would match the digits of one.
    text = re.sub(r"(?<!\))\\s\+\\s\*", r"\\s*", "".join(pieces)).replace(r"\s+\s*", r"\s+")
    # A part begins where its first number or word begins: a search tries no other place in a long
    # row of spaces or digits.
    text = re.sub(r"^\\s\*", r"(?<![0-9])", text)
    return re.compile(re.sub(r"^\\s\+|\\s\+$", "", text))
