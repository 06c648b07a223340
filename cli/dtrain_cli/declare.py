"""Declares the arguments and options of commands, for Typer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer

Offers = Callable[..., Any]
"""Returns the values that a shell offers: a function of `dtrain_cli.completion`."""


def argument(help: str, metavar: str, offers: Offers | None = None) -> Any:
    """An argument by its position."""
    return typer.Argument(help=help, metavar=metavar, autocompletion=offers)


def option(help: str, metavar: str | None = None, offers: Offers | None = None) -> Any:
    """An option with a value, which has the name of the parameter."""
    return typer.Option(help=help, metavar=metavar, autocompletion=offers)


def flag(help: str, *names: str) -> Any:
    """An option without a value; without ``names``, also its negation: ``--NAME/--no-NAME``."""
    return typer.Option(*names, help=help)
