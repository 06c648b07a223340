"""The sheet that plans are written on: its width, its colors, and what it cannot show."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from dtrain_cli.views import names

BOLD, DIM, RED, GREEN = 1, 2, 31, 32

_WIDEST = 110
"""Columns of text that are still pleasant to read."""
_ASCII = str.maketrans({"×": "x", "█": "#", "│": "|", "…": "..."})


@dataclass(frozen=True, slots=True)
class Paper:
    """What the text is written for."""

    columns: int
    color: bool
    unicode: bool
    """Whether it can show more than ASCII."""

    @property
    def width(self) -> int:
        return max(40, min(self.columns - 1, _WIDEST))

    def paint(self, text: str, code: int) -> str:
        return names.paint(text, code) if self.color and text and code else text

    def finish(self, text: str) -> str:
        """In the characters that can be shown."""
        if self.unicode:
            return text
        return text.translate(_ASCII).encode("ascii", "replace").decode()


def entry(title: str, text: str, paper: Paper) -> Iterator[str]:
    """``Model    100.4B parameters …``, wrapped beside its title."""
    first, *rest = _wrapped(text, paper.width - 9) or [""]
    yield f"{paper.paint(f'{title:<9}', BOLD)}{first}"
    yield from (" " * 9 + line for line in rest)


def paragraph(
    text: str, paper: Paper, code: int = 0, *, indent: str = "", hang: str | None = None
) -> Iterator[str]:
    """Wrapped text; ``hang`` is the indent of all lines but the first."""
    lines = _wrapped(text, paper.width, indent, indent if hang is None else hang)
    for line in lines:
        yield paper.paint(line, code) if code else line


def _wrapped(text: str, width: int, indent: str = "", hang: str = "") -> list[str]:
    """Lines of the text, in which numbers keep their units."""
    tied = re.sub(r"(?<=\d) (?=(?:%|s|ms|GB|GiB|x|×)(?:\W|$))", "\N{NO-BREAK SPACE}", text)
    lines = textwrap.wrap(
        tied,
        width,
        initial_indent=indent,
        subsequent_indent=hang,
        # Paths and commands are there to be copied.
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]
