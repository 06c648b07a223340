"""The lines in which a program prints its progress: ``job.progress.line``. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

_PLACE = re.compile(r"\{([A-Za-z_][A-Za-z0-9_/]{0,63})\}")
_COUNTS = ("step", "total")
_DIGITS = 60
"""Most digits of a number, after the first one."""
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
        if digit := re.search(_PLACE.pattern + "[0-9]", pattern):
            raise ValueError(f"has a digit right after a number, {digit[0]}")
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
    """The expression. It takes time linear in the length of a line, because a number is taken as a
    whole or not at all, and is short."""
    # A split by a pattern with one group returns texts and names in turn.
    pieces = _PLACE.split(part.strip())
    text = ""
    for at, piece in enumerate(pieces):
        last = at + 1 == len(pieces)
        if at % 2:
            text += _number(piece, (at + 1) // 2, pieces[at + 1], joined=at + 2 < len(pieces))
            continue
        words = piece.split()
        if at and piece[:1].isspace():
            text += r"\s+"
        text += r"\s+".join(map(re.escape, words))
        # `loss: {loss}` also matches `loss:4.2`.
        if words and not last:
            text += r"\s*"
        elif not at and not last:
            text += r"(?<![0-9])"
    return re.compile(text)


def _number(name: str, group: int, after: str, *, joined: bool) -> str:
    """The expression of a number. ``after``: the text that follows it; ``joined``: whether another
    number follows that."""
    between = after if joined else ""  # belongs to neither number: `{epoch}.{step}`
    marks = "".join(mark for mark in ",_" if mark != between)
    digits = rf"[0-9](?:[{marks}]?[0-9]){{0,{_DIGITS}}}"
    if after[:1] not in (",", "_"):  # the end of `step 5, loss 2` for `step {step} loss {loss}`
        digits += rf"[{marks}]*"
    text = digits
    if name not in _COUNTS:
        some = "+" if after[:1] == "." else "*"
        fraction = "" if between == "." else rf"(?:\.[0-9]{some})?"
        exponent = "" if between in ("e", "E") else r"(?:[eE][-+]?[0-9]+)?"
        text = rf"[-+]?(?:{digits}{fraction}|\.[0-9]+){exponent}|[-+]?(?i:nan|inf)"
    # What a lookahead has found is not tried again in a shorter form.
    return rf"(?=({text}))(?:\{group})(?![0-9])"
