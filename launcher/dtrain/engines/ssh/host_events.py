"""The events of one host's part of an attempt, and the actions that its state machine returns.

`dtrain.engines.ssh.host_state` has the states and the table.
"""

from __future__ import annotations

from dtrain.diagnostics import ConnectError, DtrainError, NodeError
from dtrain.engines.ssh import machine
from dtrain.failures.cause import Failure
from dtrain.messages import agent as messages
from dtrain.messages.decode import ProtocolError
from dtrain.node.agent.commands import Command
from dtrain.records import dataclass
from dtrain.runs.shown_state import ShownState

# Events: requests of the attempt, beside the actions of `machine` for one host -------------------


@dataclass(frozen=True, slots=True)
class StopWorkers:
    """TERM, ``grace`` seconds, KILL. The host stores ``reason`` for later launchers."""

    grace: float
    reason: str


@dataclass(frozen=True, slots=True)
class Settle:
    """The attempt is over: show a final state if the last shown state is not final."""

    lost: bool


@dataclass(frozen=True, slots=True)
class Close:
    """Send and observe nothing more."""


# Events: observations of the reader -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Connecting:
    """The link begins one of its first steps: connecting, checking or syncing."""

    step: ShownState


@dataclass(frozen=True, slots=True)
class CheckFailed:
    """The check of all hosts found errors. ``reason`` is this host's, or empty."""

    reason: str


@dataclass(frozen=True, slots=True)
class Requested:
    """The launch request is sent next."""


@dataclass(frozen=True, slots=True)
class Unreachable:
    """The host cannot be reached or prepared, or its relay ended."""

    error: NodeError


@dataclass(frozen=True, slots=True)
class TimedOut:
    """The host was unreachable for too long."""

    error: NodeError


@dataclass(frozen=True, slots=True)
class SupervisorTimedOut:
    error: ConnectError


@dataclass(frozen=True, slots=True)
class Malformed:
    """The host broke the protocol: it is faulty or hostile. A new connection does not help."""

    error: ProtocolError


@dataclass(frozen=True, slots=True)
class LinkFailed:
    """A bug in dtrain, or a limit of this machine."""

    error: DtrainError


LinkEvent = (
    machine.StartHost
    | machine.KillHost
    | machine.AbortHost
    | StopWorkers
    | Settle
    | Close
    | Connecting
    | CheckFailed
    | Requested
    | Unreachable
    | TimedOut
    | SupervisorTimedOut
    | Malformed
    | LinkFailed
    | messages.Prepared
    | messages.Attached
    | messages.Refused
    | messages.Lost
    | messages.Bye
    | messages.Stopping
    | messages.Ended
)


# Actions ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    command: Command


@dataclass(frozen=True, slots=True)
class Show:
    """Show the host's state to observers."""

    state: ShownState
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Close the connection, even if the reader is using it."""


@dataclass(frozen=True, slots=True)
class Post:
    """Pass an event to the attempt's state machine, with facts for the report."""

    event: machine.AttemptEvent | None
    problem: DtrainError | None = None
    failures: tuple[Failure, ...] = ()


LinkAction = Send | Show | Disconnect | Post
