"""Draw a documentation page for a terminal."""

from __future__ import annotations

import re

from rich.console import Console
from rich.markdown import Markdown

_WIDTH = 100
"""Longer lines are hard to read."""


def drawn(markdown: str, *, color: bool = True) -> str:
    """Return the page with line breaks for the terminal on standard output, and with styles if
    ``color``."""
    console = Console(color_system="auto" if color else None)
    console.width = min(console.width, _WIDTH)
    with console.capture() as capture:
        console.print(Markdown(_without_links(markdown), code_theme="ansi_dark"))
    return capture.get()


def _without_links(markdown: str) -> str:
    """Replace links to pages with the command that shows the page, and other links with their
    text."""
    text = re.sub(r"\[([^]]+)\]\(([a-z-]+)\.md[^)]*\)", r"\1 (`dtrain help \2`)", markdown)
    return re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", text)
