"""Messages of `dtrain.node.slurm.main`, the Slurm program. Pure."""

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
    """None if the run has no job."""


@dataclass(frozen=True, slots=True)
class SubmitRefused:
    """A command of Slurm failed, and no job was submitted."""

    command: _Text
    status: Status
    text: _Text


@dataclass(frozen=True, slots=True)
class JobDescribed:
    text: _Text
    """What ``scontrol show job`` says, each time it changes; empty if Slurm no longer knows the
    job."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """A command of Slurm failed. It will be repeated."""

    command: _Text
    text: _Text


@dataclass(frozen=True, slots=True)
class Cancelling:
    """The answer to ``cancel``."""


@dataclass(frozen=True, slots=True)
class JobStreamFound:
    """The next output file. Its DATA follows."""

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
    """The step of the watchers ended with an error. It will be started again."""

    text: _Text


@dataclass(frozen=True, slots=True)
class ScriptOutput:
    """The last output of the job's script, in answer to ``finish``."""

    text: _Text


@dataclass(frozen=True, slots=True)
class ProgramAlive:
    """The answer to ``ping``, at once."""


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
