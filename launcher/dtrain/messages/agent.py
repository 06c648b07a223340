"""Messages of the agent's relay, and events of its supervisor. Pure.

A message is an object with ``type``, an event one with ``event`` and ``time``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from dtrain.messages.decode import Length, Range, decode, decode_named
from dtrain.records import dataclass, shallow

Name = Annotated[str, Length(1024)]
Time = Annotated[float, Range(0, 1e11)]
"""Seconds since the epoch, up to the year 5138: later than any clock, and safe to format."""
Pid = Annotated[int, Range(0, 1 << 22)]
"""A process id. The limit is Linux's."""
Index = Annotated[int, Range(0, 10**9 - 1)]
Offset = Annotated[int, Range(0, (1 << 63) - 1)]
Status = Annotated[int, Range(-(1 << 31), (1 << 31) - 1)]
Role = Literal["worker", "chief", "ps", "evaluator", "torchrun"]
Refusal = Literal[
    "python", "setup", "container", "workdir", "script", "port", "disk", "permission", "gone",
    "agent",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Survivor:
    """A process that survives KILL."""

    pid: Pid
    name: Name


@dataclass(frozen=True, slots=True)
class Revision:
    """What Git knows of the job's code, see `dtrain.node.revision`."""

    commit: Annotated[str, Length(64)]
    changed: Annotated[tuple[Name, ...], Length(100)] = ()
    """Files that differ from the commit, or that it does not have, relative to the repository."""
    more: Annotated[int, Range(0, 10**9)] = 0
    """How many others there are."""
    digest: Annotated[str, Length(64)] = ""
    """Of the content of ``changed``; empty without any."""


# Events -------------------------------------------------------------------------------------------


_EVENTS: dict[str, type[Event]] = {}
"""All that follow, by kind."""


@dataclass(frozen=True, slots=True)
class Event:
    kind: ClassVar[str]
    time: Time

    def __init_subclass__(cls) -> None:
        _EVENTS[cls.kind] = cls

    def as_json(self) -> dict[str, Any]:
        """For the journal: only the declared fields, no others that a host sent."""
        return {"event": self.kind, **shallow(self)}


@dataclass(frozen=True, slots=True)
class Started(Event):
    """A process has started."""

    kind = "started"
    role: Role
    index: Index
    rank: Index | None
    pid: Pid


@dataclass(frozen=True, slots=True)
class RankStarted(Event):
    """torchrun has started a rank. Its streams are ``rank-<rank>.out`` and ``.err``."""

    kind = "rank"
    role: Role
    index: Index
    rank: Index


@dataclass(frozen=True, slots=True)
class ErrorReport:
    """A worker's own report of its failure."""

    message: str = ""
    traceback: str = ""
    time: Time | None = None


@dataclass(frozen=True, slots=True)
class RankFailure:
    """How a rank of torchrun failed."""

    rank: Index
    pid: Pid | None = None
    exitcode: Status | None = None
    signal: Name | None = None
    message: str = ""
    traceback: str = ""
    time: Time | None = None


@dataclass(frozen=True, slots=True)
class Exited(Event):
    kind = "exited"
    role: Role
    index: Index
    rank: Index | None
    pid: Pid
    code: Status | None
    signal: Name | None
    stopping: bool
    error: ErrorReport | None = None
    out_of_memory: bool = False
    ranks: tuple[RankFailure, ...] | None = None
    """The ranks that failed, if the process is a torchrun."""

    @property
    def failed(self) -> bool:
        """Whether it has not finished its work. A process that was stopped has not, even if its
        status is 0."""
        return self.code != 0 or self.stopping


@dataclass(frozen=True, slots=True)
class CodeFound(Event):
    """The job's code on the first host, at the start of an attempt."""

    kind = "code"
    revision: Revision


@dataclass(frozen=True, slots=True)
class Kernel(Event):
    """The problems in the kernel's log since the start or the last such event, if this user may
    read it. Reported after the failure of a process or `Stopping`, before `Ended`, like
    `Collectives`."""

    kind = "kernel"
    lines: Annotated[tuple[tuple[Time, Annotated[str, Length(4096)]], ...], Length(1000)]
    gpus: Annotated[tuple[Name, ...], Length(1000)]
    """The PCI addresses of the host's NVIDIA GPUs, in order."""


@dataclass(frozen=True, slots=True)
class Stack(Event):
    """The stack of a worker, or of a rank of a torchrun, by py-spy."""

    kind = "stack"
    role: Role
    index: Index
    rank: Index | None
    text: str
    """Empty if py-spy has none."""
    problem: Annotated[str, Length(1000)] = ""
    """Why py-spy has none."""


@dataclass(frozen=True, slots=True)
class Call:
    """One collective that a rank has called."""

    seq: int
    """Its number in the group, the same on all ranks."""
    op: Name
    tensors: tuple[tuple[Name, tuple[int, ...]], ...]
    done: bool
    frames: tuple[tuple[Name, Name, int], ...]
    """Function, file, line; innermost first. Only the last call has them."""


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    id: Name
    name: Name
    ranks: tuple[Index, ...]
    """Empty if the recorder does not list them."""
    calls: tuple[Call, ...]


@dataclass(frozen=True, slots=True)
class Collectives(Event):
    """A rank's flight recorder dump: the last collectives in each process group, without
    point-to-point messages."""

    kind = "collectives"
    rank: Index
    groups: tuple[ProcessGroup, ...]


@dataclass(frozen=True, slots=True)
class Ras(Event):
    """The status report of NCCL's RAS service, if the command asked for it and it answers."""

    kind = "ras"
    text: Annotated[str, Length(64 << 10)]


@dataclass(frozen=True, slots=True)
class StacksDone(Event):
    """Everything that the command asked for is reported."""

    kind = "stacks_done"


@dataclass(frozen=True, slots=True)
class Stopping(Event):
    kind = "stopping"
    reason: str
    asked: bool = False
    """Whether a launcher asked for it."""


@dataclass(frozen=True, slots=True)
class Ended(Event):
    kind = "ended"
    survivors: tuple[Survivor, ...]
    error: str | None = None
    """How the supervisor itself failed."""
    connected: bool | None = None
    """Whether a worker of this host was ever connected to another worker, if that is known."""


# Messages -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    time: Time
    """The node's clock."""
    pid: Pid


@dataclass(frozen=True, slots=True)
class Prepared:
    """The launch is ready for the command ``start``."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The job cannot start here, and the launch is undone. The last message. ``gone`` answers
    ``attach``: the run has no folder here, so it never started, or was removed."""

    what: Refusal
    reason: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Attached:
    """The relay follows the run."""


@dataclass(frozen=True, slots=True)
class ProcessSeen:
    """A process, in the answer to ``look``."""

    role: Role
    index: Index
    rank: Index | None
    pid: Pid
    started: Time
    ended: Time | None
    code: Status | None
    signal: Name | None


@dataclass(frozen=True, slots=True)
class RunSeen:
    """The answer to ``look``. The last message. A run that is ``gone`` has no recorded end: the
    machine was restarted, or the supervisor was killed."""

    state: Literal["missing", "preparing", "ready", "running", "ended", "gone"]
    since: Time | None
    why: str
    processes: tuple[ProcessSeen, ...]


@dataclass(frozen=True, slots=True)
class StreamFound:
    """The next output file. Its DATA follows."""

    id: Annotated[int, Range(1, (1 << 32) - 1)]
    name: Annotated[str, re.compile(r"[a-z]+-[0-9]{1,9}\.(?:out|err)")]


@dataclass(frozen=True, slots=True)
class Happened:
    """One line of the run's events."""

    offset: Offset
    """Where the next line begins."""
    event: Event


@dataclass(frozen=True, slots=True)
class ProgressReport:
    """One line that a worker wrote through `dtrain.runtime` into the file ``name`` of the run's
    folder: an event ``progress``, ``steps`` or ``tensorboard``."""

    name: Annotated[str, re.compile(r"[^/\0]{1,1000}\.progress")]
    offset: Offset
    """Where the next line begins."""
    said: Any
    """The value that the worker wrote, of any type. An error in it is not the agent's."""


@dataclass(frozen=True, slots=True)
class Telemetry:
    """The host's telemetry of the last second, or averages of 10 s in the order of their times."""

    type: Literal["sample", "average"]
    said: Any
    """What `dtrain.messages.telemetry.Sample` reads, or anything else: workers can write it."""


@dataclass(frozen=True, slots=True)
class Alive:
    """The answer to ``ping``."""

    supervisor: Pid | None
    """Its process id, if there is one."""
    silent: Annotated[float, Range(0, 1e7)]
    """Seconds since the supervisor's last answer."""
    time: Time | None = None
    """The host's clock."""


@dataclass(frozen=True, slots=True)
class Notice:
    text: Annotated[str, Length(16 << 10)]
    """A message for the user."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The relay has ended the run's processes, because the supervisor died, or because some
    survived the end of the run before this relay attached."""

    reason: str
    survivors: tuple[Survivor, ...] = ()
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Bye:
    """Everything has been sent."""


AgentMessage = (
    Hello
    | Prepared
    | Refused
    | Attached
    | RunSeen
    | StreamFound
    | Happened
    | ProgressReport
    | Telemetry
    | Alive
    | Notice
    | Lost
    | Bye
)

_MESSAGES: dict[str, Callable[..., AgentMessage]] = {
    "hello": Hello,
    "prepared": Prepared,
    "refused": Refused,
    "attached": Attached,
    "status": RunSeen,
    "stream": StreamFound,
    "progress": ProgressReport,
    "sample": Telemetry,
    "average": Telemetry,
    "alive": Alive,
    "notice": Notice,
    "lost": Lost,
    "bye": Bye,
}


_NAMES = {kind: name for name, kind in _MESSAGES.items()}


def name_of(message: AgentMessage) -> str:
    """The message's ``type``."""
    return _NAMES.get(type(message), "event")


def read_message(body: Mapping[str, Any]) -> AgentMessage:
    """A relay's message. Raises ProtocolError."""
    if body.get("type") == "event":
        offset = decode(Offset, body.get("offset"), "event.offset")
        return Happened(offset, read_event(body.get("event")))
    return decode_named(_MESSAGES, body, "message")


def read_event(body: Any) -> Event:
    """An event of a supervisor. Raises ProtocolError."""
    return decode_named(_EVENTS, body, "event", "event")
