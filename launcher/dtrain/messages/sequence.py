"""Checks a host's reports against the launch plan and its earlier reports. Pure.

A relay that resumes after a lost connection may repeat events; their offset identifies them. Any
other impossible event is a ProtocolError of that host.
"""

from __future__ import annotations

from dtrain.launchplan import names
from dtrain.launchplan.plan import HostPlan
from dtrain.messages.agent import (
    AgentMessage,
    Attached,
    Collectives,
    Ended,
    Event,
    Exited,
    Happened,
    Hello,
    Prepared,
    ProcessSeen,
    RankStarted,
    Stack,
    Started,
    Stopping,
    StreamFound,
    name_of,
)
from dtrain.messages.decode import ProtocolError


class MessageSequence:
    """The events of one host in one attempt, in the order in which they arrive."""

    def __init__(self, part: HostPlan, world_size: int) -> None:
        self._ranks = {(one.role, one.index): one.rank for one in part.processes}
        self._torchrun = any(one.role == "torchrun" for one in part.processes)
        self._world_size = world_size
        self._started: dict[tuple[str, int], int] = {}
        """Process id by role and index."""
        self._exited: set[tuple[str, int]] = set()
        self._stopping = False
        self.ended = False
        self._offset = 0
        self._once: set[type[AgentMessage]] = set()
        """Messages that a relay sends only once and that the current relay has sent."""

    def begin_relay(self) -> None:
        """A new relay starts."""
        self._once.clear()

    def check_message(self, message: AgentMessage, *, started: bool) -> None:
        """Raises ProtocolError for a message that is out of order. ``started``: whether the host
        was ordered to start its processes."""
        kind = type(message)
        name = name_of(message)
        if (kind is Hello) != (Hello not in self._once):
            raise ProtocolError(f"{name}: a relay must send hello first, and only once")
        if kind in self._once:
            raise ProtocolError(f"{name}: sent twice")
        if kind in (Hello, Prepared, Attached):
            self._once.add(kind)
        if kind in (StreamFound, Happened) and not started:
            raise ProtocolError(f"{name}: the job has not started on this host")
        if kind is Prepared and started:
            raise ProtocolError(f"{name}: the job has already started on this host")

    def is_new(self, happened: Happened) -> bool:
        """Check one event. Returns False if it is a repetition. Raises ProtocolError."""
        if happened.offset <= self._offset:
            return False
        self._take(happened.event)
        self._offset = happened.offset
        return True

    def check_stream(self, stream: StreamFound) -> None:
        """Raises ProtocolError unless the stream is one of this host's."""
        role, number = names.parsed(stream.name.partition(".")[0])
        # Only torchrun has ranks whose output is separate from its own.
        if role == "rank" and self._torchrun:
            self._check_rank(number)
        elif (role, number) not in self._ranks:
            raise ProtocolError(f"stream: {stream.name} is not an output of this host")

    def _take(self, event: Event) -> None:
        late = self.ended and isinstance(event, Started | RankStarted | Exited | Stopping | Ended)
        if late:
            raise ProtocolError(f"{event.kind}: the host already reported the end of the job")
        match event:
            case Started():
                key = self.check_process(event)
                if key in self._started:
                    raise ProtocolError(f"started: {event.role} {event.index} started twice")
                self._started[key] = event.pid
            case RankStarted():
                self._check_started(event)
                self._check_rank(event.rank)
            case Exited():
                self._check_exited(event)
            case Stack() if event.rank is None:
                self.check_process(event)
            case Stack() | Collectives():
                self._check_rank(event.rank)
            case Stopping():
                if self._stopping:
                    raise ProtocolError("stopping: sent twice")
                self._stopping = True
            case Ended():
                self._check_ended(event)

    def _check_exited(self, event: Exited) -> None:
        key = self._check_started(event)
        if event.pid != self._started[key]:
            raise ProtocolError(
                f"exited: {event.role} {event.index} started as process {self._started[key]},"
                f" and process {event.pid} exited"
            )
        if key in self._exited:
            raise ProtocolError(f"exited: {event.role} {event.index} exited twice")
        for rank in event.ranks or ():
            self._check_rank(rank.rank)
        self._exited.add(key)

    def _check_ended(self, event: Ended) -> None:
        running = self._ranks.keys() - self._exited
        if running and not (event.survivors or event.error):
            role, index = min(running)
            raise ProtocolError(f"ended: {role} {index} has not exited")
        self.ended = True

    def check_process(self, event: _OfProcess) -> tuple[str, int]:
        """The role and index. Raises ProtocolError unless the process is one of this host's."""
        key = event.role, event.index
        if key not in self._ranks:
            raise ProtocolError(f"this host has no process {event.role} {event.index}")
        if not isinstance(event, RankStarted) and event.rank != self._ranks[key]:
            raise ProtocolError(f"{event.role} {event.index} is not rank {event.rank}")
        return key

    def _check_started(self, event: RankStarted | Exited) -> tuple[str, int]:
        key = self.check_process(event)
        if key not in self._started:
            raise ProtocolError(f"{event.kind}: {event.role} {event.index} has not started")
        return key

    def _check_rank(self, rank: int | None) -> None:
        if rank is None or rank >= self._world_size:
            raise ProtocolError(f"the job has no rank {rank}")


_OfProcess = Started | RankStarted | Exited | Stack | ProcessSeen
