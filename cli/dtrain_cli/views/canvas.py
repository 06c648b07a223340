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
_ERASE = "\x1b[K"
"""Erases from the cursor to the end of its line."""
_CONSOLE = Console(file=io.StringIO(), width=1 << 14, markup=False, emoji=False)


def frame(lines: Sequence[Text], columns: int, *, color: bool) -> str:
    """The sequences that show ``lines``, one for each row of a screen with ``columns`` columns."""
    # Erase each line after it is written, so that nothing flickers on terminals that do not know
    # _BEGIN. After a full line, the cursor is on the last character, which an erase would remove.
    # An echoed ^C appears at the cursor, and the next frame replaces it.
    body = "".join(
        f"\x1b[{row};1H{_escaped(line, color)}{_ERASE * (line.cell_len < columns)}"
        for row, line in enumerate(lines, 1)
    )
    return f"{_BEGIN}{body}\x1b[H{_END}"


def _escaped(line: Text, color: bool) -> str:
    if not color:
        return line.plain
    if not line.spans and line.style:  # rich ignores the style of a text that has no spans
        line = Text.assemble((line.plain, line.style))
    return "".join(
        segment.style.render(segment.text, color_system=ColorSystem.STANDARD)
        if segment.style
        else segment.text
        for segment in line.render(_CONSOLE)
    )
