"""Messages of `dtrain.node.slurm.main`, the Slurm program. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from dtrain.messages.agent import (
    Bye,
    Event,
    Name,
    Notice,
    ProgressReport,
    Revision,
    Status,
    StreamFound,
    Telemetry,
    read_event,
)
from dtrain.messages.decode import Length, Range, decode, decode_named
from dtrain.records import dataclass

JobId = Annotated[str, re.compile(r"[0-9]{1,10}")]
"""The number of a job."""
_Text = Annotated[str, Length(1 << 17)]


@dataclass(frozen=True, slots=True)
class Submitted:
    job: JobId | None
    """None if the run has no job."""
    uncertain: bool
    """Whether the controller may have a request of sbatch that it has not handled yet."""


@dataclass(frozen=True, slots=True)
class SubmitRefused:
    """Slurm shows no job."""

    command: _Text
    """The command of Slurm that failed; empty if it was not begun."""
    status: Status
    text: _Text
    uncertain: bool
    """As in `Submitted`."""
    hint: _Text = ""
    """The remedy, if the program knows it."""


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
class TaskEnded:
    """A task of the main step ended. With which status, only srun says, and only of those that
    failed."""

    task: Annotated[int, Range(0, 10**6)]
    """Its number in the main step."""
    time: float
    """Seconds since the epoch, on the clock of the shared folder."""


MachineMessage = StreamFound | ProgressReport | TaskEnded | Telemetry | Notice | Event
"""An event is evidence about the workers."""


@dataclass(frozen=True, slots=True)
class FromMachine:
    """A message about a machine, of a type that its agent sends over SSH."""

    host: Name
    message: MachineMessage


@dataclass(frozen=True, slots=True)
class CodeOnLogin:
    """What Git on the login node knows of the job's code."""

    revision: Revision


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
    | FromMachine
    | CodeOnLogin
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
    "code": CodeOnLogin,
    "unwatched": Unwatched,
    "script": ScriptOutput,
    "alive": ProgramAlive,
    "bye": Bye,
}
_OF_MACHINES: dict[str, Callable[..., MachineMessage]] = {
    "stream": StreamFound,
    "progress": ProgressReport,
    "ended": TaskEnded,
    "sample": Telemetry,
    "average": Telemetry,
    "notice": Notice,
}


def read_message(body: Mapping[str, Any]) -> SlurmMessage:
    """Raises ProtocolError."""
    if "host" not in body:
        return decode_named(_MESSAGES, body, "message")
    host = decode(Name, body["host"], "host")
    if body.get("type") == "event":
        return FromMachine(host, read_event(body.get("event")))
    return FromMachine(host, decode_named(_OF_MACHINES, body, "message"))
