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
        shown = "".join(_progress)
        erase = _ERASE if shown else ""
        _put(f"{erase}dtrain: {clean(text)}\n{shown}")  # at once: it may come from any thread


_ERASE = "\r\x1b[K"
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
        _put(text)
    try:
        yield
    finally:
        if shown:
            _progress.clear()
            _put(_ERASE)


@contextmanager
def without_progress() -> Iterator[None]:
    """Erase what `progress` shows until the block ends, for a question in its place."""
    if shown := "".join(_progress):
        _progress[:] = [""]
        _put(_ERASE)
    try:
        yield
    finally:
        if shown and _progress:  # the command still runs
            _progress[:] = [shown]
            _put(shown)


def _put(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()  # a command may still run for minutes


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
