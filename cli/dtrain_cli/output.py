"""Print a command's result on stdout."""

from __future__ import annotations

import typer


def write(text: str) -> None:
    """Print ``text`` as the same bytes in every locale."""
    typer.echo(text.encode(errors="surrogateescape"), nl=False)
