"""Print a command's result on stdout, and what goes beside it on stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from dtrain.framing import clean

if TYPE_CHECKING:
    from dtrain_cli.views.paper import Paper


def write(text: str) -> None:
    """Print ``text`` as the same bytes in every locale."""
    typer.echo(text.encode(errors="surrogateescape"), nl=False)


def notice(text: str) -> None:
    """Print on stderr what users should know although they did not ask for it."""
    if sys.stderr is not None:
        erase = "\r\x1b[K" if _progress else ""
        sys.stderr.write("".join([erase, f"dtrain: {clean(text)}\n", *_progress]))
        sys.stderr.flush()  # a command may still run for minutes


_progress: list[str] = []
"""What `progress` shows now."""


@contextmanager
def progress(text: str) -> Iterator[None]:
    """Show ``text`` until the block ends, on a terminal that can erase it."""
    # Most commands write their result alone, and views take long to import.
    from dtrain_cli.views import can_redraw

    shown = sys.stderr is not None and can_redraw(sys.stderr.isatty())
    if shown:
        _progress.append(text)
        sys.stderr.write(text)
        sys.stderr.flush()
    try:
        yield
    finally:
        if shown:
            _progress.clear()
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def stdout_paper() -> Paper:
    """The paper of standard output. Without a terminal, its width is COLUMNS, or 100."""
    # rich is slow to import, and only reports need it.
    from dtrain_cli.views import color
    from dtrain_cli.views.outlet import Outlet
    from dtrain_cli.views.paper import Paper

    outlet = Outlet(sys.stdout)
    columns, _ = outlet.size()
    if not outlet.terminal:
        wanted = os.environ.get("COLUMNS", "")
        columns = int(wanted) if wanted.isdecimal() and len(wanted) < 6 else 100
    encoding = (getattr(sys.stdout, "encoding", None) or "").lower().replace("-", "")
    return Paper(
        columns,
        color=color(outlet.terminal),
        unicode=outlet.terminal and encoding == "utf8",
        terminal=outlet.terminal,
    )
