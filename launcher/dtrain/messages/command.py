"""Messages of the program that runs commands. Pure. `dtrain.node.command` documents them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, cast

from dtrain.messages.agent import Bye
from dtrain.messages.decode import Length, ProtocolError, Range, decode, excerpt
from dtrain.records import dataclass


@dataclass(frozen=True, slots=True)
class CommandExited:
    command: Annotated[int, Range(0, 1 << 20)]
    code: Annotated[int, Range(0, 255)] | None
    signal: Annotated[str, Length(32)] | None
    late: bool
    reason: Annotated[str, Length(1 << 16)]


CommandMessage = CommandExited | Bye

_MESSAGES: dict[str, type[CommandMessage]] = {"exited": CommandExited, "bye": Bye}


def read_message(body: Mapping[str, Any]) -> CommandMessage:
    """Raises ProtocolError."""
    kind = body.get("type")
    if not isinstance(kind, str) or kind not in _MESSAGES:
        raise ProtocolError(f"unknown message {excerpt(kind)}")
    return cast(CommandMessage, decode(_MESSAGES[kind], body, kind))
