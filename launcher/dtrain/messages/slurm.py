"""Messages of the Slurm program. Pure. `dtrain.node.slurm.main` documents them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, cast

from dtrain.messages.agent import Name, Status
from dtrain.messages.decode import Length, ProtocolError, Range, decode, excerpt

Job = Annotated[str, re.compile(r"[0-9]{1,10}")]
"""The number of a job."""
Text = Annotated[str, Length(1 << 17)]


@dataclass(frozen=True, slots=True)
class Submitted:
    job: Job | None


@dataclass(frozen=True, slots=True)
class Refused:
    command: Text
    status: Status
    text: Text


@dataclass(frozen=True, slots=True)
class JobSaid:
    text: Text


@dataclass(frozen=True, slots=True)
class Trouble:
    command: Text
    text: Text


@dataclass(frozen=True, slots=True)
class Cancelling:
    """The answer to ``cancel``."""


@dataclass(frozen=True, slots=True)
class StreamFound:
    id: Annotated[int, Range(1, (1 << 32) - 1)]
    host: Name
    name: Annotated[str, re.compile(r"[a-z]+-[0-9]{1,9}\.(?:out|err)")]


@dataclass(frozen=True, slots=True)
class ScriptSaid:
    text: Text


@dataclass(frozen=True, slots=True)
class Alive:
    pass


@dataclass(frozen=True, slots=True)
class Bye:
    pass


Message = (
    Submitted | Refused | JobSaid | Trouble | Cancelling | StreamFound | ScriptSaid | Alive | Bye
)

_MESSAGES: dict[str, type[Message]] = {
    "submitted": Submitted,
    "refused": Refused,
    "job": JobSaid,
    "trouble": Trouble,
    "cancelling": Cancelling,
    "stream": StreamFound,
    "script": ScriptSaid,
    "alive": Alive,
    "bye": Bye,
}


def read_message(body: Mapping[str, Any]) -> Message:
    """Raises ProtocolError."""
    kind = body.get("type")
    if not isinstance(kind, str) or kind not in _MESSAGES:
        raise ProtocolError(f"unknown message {excerpt(kind)}")
    return cast(Message, decode(_MESSAGES[kind], body, kind))
