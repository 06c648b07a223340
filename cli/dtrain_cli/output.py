"""What a verb prints on stdout when it is done."""

from __future__ import annotations

import typer


def write(text: str) -> None:
    """Print ``text``: the same bytes whatever the locale."""
    typer.echo(text.encode(errors="surrogateescape"), nl=False)
