"""Messages of `dtrain.node.command`, the program that runs commands. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from dtrain.messages.agent import Bye
from dtrain.messages.decode import Length, Range, decode_named
from dtrain.records import dataclass


@dataclass(frozen=True, slots=True)
class CommandExited:
    command: Annotated[int, Range(0, 1 << 20)]
    code: Annotated[int, Range(0, 255)] | None
    signal: Annotated[str, Length(32)] | None
    """One of the two is None."""
    late: bool
    """Whether the time limit ended it."""
    reason: Annotated[str, Length(1 << 16)]
    """Why it could not be executed; empty if it was."""


CommandMessage = CommandExited | Bye

_MESSAGES: dict[str, Callable[..., CommandMessage]] = {"exited": CommandExited, "bye": Bye}


def read_message(body: Mapping[str, Any]) -> CommandMessage:
    """Raises ProtocolError."""
    return decode_named(_MESSAGES, body, "message")
