"""Messages of the Slurm program. Pure. `dtrain.node.slurm.main` documents them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from dtrain.messages.agent import Bye, Event, Name, Status, read_event
from dtrain.messages.decode import Length, Range, decode, decode_named
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

_MESSAGES: dict[str, Callable[..., SlurmMessage]] = {
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
    if body.get("type") == "event":
        host = decode(Name, body.get("host"), "event.host")
        return MachineEvent(host, read_event(body.get("event")))
    return decode_named(_MESSAGES, body, "message")
