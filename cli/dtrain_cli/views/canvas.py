"""Draws whole screens on the alternate screen of a terminal, so that nothing stays behind."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.color import ColorSystem
from rich.console import Console
from rich.text import Text

# Without wrapping, a character that is wider than rich thinks does not shift the lines below.
ENTER = "\x1b[?1049h\x1b[?7l\x1b[?25l"
LEAVE = "\x1b[H\x1b[J\x1b[?25h\x1b[?7h\x1b[?1049l"
_BEGIN, _END = "\x1b[?2026h", "\x1b[?2026l"
"""The terminal shows what is between them at once, if it knows them."""
_CONSOLE = Console(file=io.StringIO(), width=1 << 14, markup=False, emoji=False)


def frame(lines: Sequence[Text], *, color: bool) -> str:
    """The sequences that show ``lines``, one for each row of the screen."""
    # Erase each line after it is written, so that nothing flickers on terminals that do not know
    # _BEGIN. An echoed ^C appears at the cursor, and the next frame replaces it.
    body = "".join(
        f"\x1b[{row};1H{_escaped(line, color)}\x1b[K" for row, line in enumerate(lines, 1)
    )
    return f"{_BEGIN}{body}\x1b[H{_END}"


def _escaped(line: Text, color: bool) -> str:
    if not color:
        return line.plain
    return "".join(
        segment.style.render(segment.text, color_system=ColorSystem.STANDARD)
        if segment.style
        else segment.text
        for segment in line.render(_CONSOLE)
    )
