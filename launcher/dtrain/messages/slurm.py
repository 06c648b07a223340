"""Messages of the Slurm program. Pure. `dtrain.node.slurm.main` documents them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, cast

from dtrain.messages.agent import Bye, Event, Name, Status, read_event
from dtrain.messages.decode import Length, ProtocolError, Range, decode, excerpt
from dtrain.records import dataclass

JobId = Annotated[str, re.compile(r"[0-9]{1,10}")]
"""The number of a job."""
_Text = Annotated[str, Length(1 << 17)]


@dataclass(frozen=True, slots=True)
class Submitted:
    job: JobId | None


@dataclass(frozen=True, slots=True)
class SubmitRefused:
    command: _Text
    status: Status
    text: _Text


@dataclass(frozen=True, slots=True)
class JobDescribed:
    text: _Text


@dataclass(frozen=True, slots=True)
class Trouble:
    command: _Text
    text: _Text


@dataclass(frozen=True, slots=True)
class Cancelling:
    """The answer to ``cancel``."""


@dataclass(frozen=True, slots=True)
class JobStreamFound:
    id: Annotated[int, Range(1, (1 << 32) - 1)]
    host: Name
    name: Annotated[str, re.compile(r"[a-z]+-[0-9]{1,9}\.(?:out|err)")]


@dataclass(frozen=True, slots=True)
class WorkerReport:
    host: Name
    name: Annotated[str, re.compile(r"[^/\0]{1,1000}\.progress")]
    said: Any
    """The value that the worker wrote, of any type."""


@dataclass(frozen=True, slots=True)
class MachineSample:
    host: Name
    said: Any


@dataclass(frozen=True, slots=True)
class MachineAverage:
    host: Name
    said: Any


@dataclass(frozen=True, slots=True)
class MachineEvent:
    """Evidence about the workers of a machine."""

    host: Name
    event: Event


@dataclass(frozen=True, slots=True)
class Unwatched:
    text: _Text
    """Why no watcher runs."""


@dataclass(frozen=True, slots=True)
class ScriptOutput:
    text: _Text


@dataclass(frozen=True, slots=True)
class ProgramAlive:
    pass


SlurmMessage = (
    Submitted
    | SubmitRefused
    | JobDescribed
    | Trouble
    | Cancelling
    | JobStreamFound
    | WorkerReport
    | MachineSample
    | MachineAverage
    | MachineEvent
    | Unwatched
    | ScriptOutput
    | ProgramAlive
    | Bye
)

_MESSAGES: dict[str, type[SlurmMessage]] = {
    "submitted": Submitted,
    "refused": SubmitRefused,
    "job": JobDescribed,
    "trouble": Trouble,
    "cancelling": Cancelling,
    "stream": JobStreamFound,
    "progress": WorkerReport,
    "sample": MachineSample,
    "average": MachineAverage,
    "unwatched": Unwatched,
    "script": ScriptOutput,
    "alive": ProgramAlive,
    "bye": Bye,
}


def read_message(body: Mapping[str, Any]) -> SlurmMessage:
    """Raises ProtocolError."""
    kind = body.get("type")
    if kind == "event":
        host = decode(Name, body.get("host"), "event.host")
        return MachineEvent(host, read_event(body.get("event")))
    if not isinstance(kind, str) or kind not in _MESSAGES:
        raise ProtocolError(f"unknown message {excerpt(kind)}")
    return cast(SlurmMessage, decode(_MESSAGES[kind], body, kind))
