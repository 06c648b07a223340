"""A SpecError as text for a terminal: every problem with its line, a caret and a hint."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from dtrain.diagnostics import Problem, SpecError
from dtrain.spec.problems import visible
from dtrain.wording import counted, either

MAX_SHOWN = 50
WIDTH = 100
"""Columns of a source line to show; a longer line is cut around the caret."""

_TAB = "    "


def render_problems(error: SpecError) -> str:
    """The report, with a count at the end. Every line is safe to print on a terminal."""
    blocks = [_block(problem) for problem in error.problems[:MAX_SHOWN]]
    left = len(error.problems) - MAX_SHOWN
    if left > 0:
        blocks.append(f"… and {left} more\n")
    files = dict.fromkeys(_safe(one.position.file) for one in error.problems if one.position)
    where = f" in {either(files, 'and')}" if files else ""
    blocks.append(f"{counted(len(error.problems), 'problem')}{where}\n")
    return "\n".join(blocks)


def render_warnings(problems: Sequence[Problem]) -> str:
    """The report of warnings, without a count; empty if there are none."""
    return "\n".join(_block(problem, "warning") for problem in problems)


def _block(problem: Problem, kind: str = "error") -> str:
    position = problem.position
    where = f"{_safe(position.file)}:{position.line}:{position.column}: " if position else ""
    lines = [f"{kind}: {where}{_safe(problem.message)}"]
    if position and problem.source_line.strip():
        text, indent, width = _excerpt(problem.source_line, position.column - 1, problem.width)
        number = str(position.line)
        lines.append(f"  {number} | {text}")
        lines.append(f"  {' ' * len(number)} | {' ' * indent}{'^' * width}")
    if problem.hint:
        lines.append(f"hint: {_safe(problem.hint)}")
    return "\n".join(lines) + "\n"


def _excerpt(line: str, start: int, width: int) -> tuple[str, int, int]:
    """A printable excerpt of a line, and the caret's indent and width in terminal columns."""
    line = line.rstrip()
    stop = max(min(start + width, len(line)), start + 1)
    first = 0 if len(line) <= WIDTH else max(0, min(start - WIDTH // 4, len(line) - WIDTH))
    last = first + WIDTH
    before, marked = line[first:start], line[start : min(stop, last)]
    head, tail = "…" if first else "", "…" if len(line) > last else ""
    text = head + _safe(line[first:last]) + tail
    indent = _columns(head + _safe(before))
    return text, indent, max(_columns(_safe(marked)), 1)


def _safe(text: str) -> str:
    return "".join(_TAB if character == "\t" else visible(character) for character in text)


def _columns(text: str) -> int:
    """The width of a text in terminal columns."""
    shown = [character for character in text if not unicodedata.combining(character)]
    return len(shown) + sum(unicodedata.east_asian_width(one) in "WF" for one in shown)
