"""The orders of the launcher to the program of `dtrain exec`: lines of JSON. The first is a
`CommandRequest`.

Not shipped: the launcher imports it, and the type checks of the modules that run on nodes.
"""

from __future__ import annotations

from typing import Literal, TypedDict


class CommandRequest(TypedDict):
    """Start the commands in the home folder."""

    commands: list[list[str]]
    hidden: list[str]
    """Variables that the commands do not inherit."""
    limit: float | None
    """Seconds after which the commands are stopped."""
    grace: float
    """Seconds from TERM to KILL at the limit, or when the launcher is gone."""


class StopCommands(TypedDict):
    """TERM to every process of the commands, and KILL after ``grace`` seconds."""

    op: Literal["stop"]
    grace: float
