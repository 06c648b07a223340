"""How errors and warnings look on the terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import typer

from dtrain.diagnostics import DtrainError, SpecError

if TYPE_CHECKING:
    from dtrain.spec.model import ClusterFile


def explain(error: DtrainError) -> int:
    """Print ``error`` with its hints. Returns its exit code."""
    if isinstance(error, SpecError):
        from dtrain.spec.report import render_problems

        say(render_problems(error).rstrip("\n"))
    else:
        # At once: another thread may explain the error of another run.
        hints = (f"hint: {line}" for line in error.hint.splitlines())
        say("\n".join((f"error: {error.message}", *hints)))
    return error.exit_code


def warn(spec: ClusterFile) -> None:
    """Print the warnings about a cluster file."""
    if spec.warnings:
        from dtrain.spec.report import render_warnings

        say(render_warnings(spec.warnings).rstrip("\n"))


def say(text: str) -> None:
    """Print to stderr, with control characters escaped: the text may quote files and hosts."""
    from dtrain.framing import clean
    from dtrain_cli.views import color

    if sys.stderr is not None:
        lines = [clean(line) for line in text.split("\n")]
        if color(sys.stderr.isatty()):
            from dtrain_cli.views.names import marked

            lines = [*map(marked, lines)]
        typer.echo("\n".join(lines), err=True, color=True)
