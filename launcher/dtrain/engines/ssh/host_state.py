"""One host's part of an attempt, as a state machine in a table.

Theory of operation
-------------------
The link connects, checks the host and syncs files (``CONNECTING``). Nothing on the host outlives
the connection yet, so an abort or an error simply ends the host's part. Then the link sends the
launch request (``PREPARING``). From now on only the host can confirm that nothing is left there.
An abort is therefore a command, and the host answers it with ``bye`` (``ABORTING``).

A prepared host starts its workers on the controller's command (``RUNNING``). They run until the
controller stops or kills them (``STOPPING``). In both phases a broken connection changes nothing:
the link reconnects and sends the last command to the new relay. The link gives the host up only if
it cannot reconnect in time, or if the host breaks the protocol.

Once the host has reported how its part ended, or is given up, only output can still arrive
(``DRAINING``), and after that nothing (``OVER``). The controller can close the link at any time
(``CLOSED``).

`step` is pure: it takes a state and an event, and returns the new state and the actions to carry
out, in order. Events are the controller's requests, the relay's messages and the observations of
the link's reader. Several events can end a host's part; only the first reaches the controller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum, auto
from typing import Any

from dtrain.diagnostics import (
    AnswerError,
    ConnectError,
    NodeError,
    PortBusyError,
    PrepareError,
)
from dtrain.engines.ssh import machine, problems
from dtrain.engines.ssh.host_events import (
    CheckFailed,
    Close,
    Connecting,
    Disconnect,
    LinkAction,
    LinkEvent,
    LinkFailed,
    Malformed,
    Post,
    Requested,
    Send,
    Settle,
    Show,
    StopWorkers,
    SupervisorTimedOut,
    TimedOut,
    Unreachable,
)
from dtrain.messages import agent as messages
from dtrain.messages.decode import ProtocolError
from dtrain.node.agent.commands import Kill, Start, Stop
from dtrain.records import dataclass
from dtrain.runs.shown_state import ShownState

_RECEIVING = "receiving the end of the output"
"""What is still to be done once the job has ended on the host."""


class HostPhase(Enum):
    CONNECTING = auto()
    PREPARING = auto()
    ABORTING = auto()
    RUNNING = auto()
    STOPPING = auto()
    DRAINING = auto()
    OVER = auto()
    CLOSED = auto()


class Leftovers(Enum):
    """What may be left of the job on a host."""

    UNKNOWN = auto()
    SOME = auto()
    """A process survives KILL."""
    NONE = auto()
    NO_RUN = auto()
    """Nothing is left: the host does not know the run."""


@dataclass(frozen=True, slots=True)
class LinkState:
    host: str
    phase: HostPhase = HostPhase.CONNECTING
    movable_port: bool = False
    """Whether the launch tries another port if this one is busy."""
    command: Start | Stop | Kill | None = None
    """The current command. Each new relay gets it."""
    shown: ShownState | None = None
    """The last state that observers got."""
    end: Show | None = None
    """What observers got when the host reported its end."""
    leftovers: Leftovers = Leftovers.UNKNOWN
    cut_off: bool = False
    """Whether the host cannot be reached: the connection broke, or does not exist yet."""
    stop_reason: str = ""
    """Why a launcher stopped the job, as the host reports it."""

    @property
    def started(self) -> bool:
        """Whether the workers have started and the host may still send output."""
        return self.phase in (HostPhase.RUNNING, HostPhase.STOPPING, HostPhase.DRAINING)

    @property
    def stopping(self) -> bool:
        return self.command is not None and self.command["op"] != "start"

    @property
    def reported_end(self) -> bool:
        """Whether the controller knows how the host's part ended."""
        return self.phase in (HostPhase.DRAINING, HostPhase.OVER)

    @property
    def doubtful(self) -> bool:
        """Whether processes may be left on a host that could report it."""
        if self.leftovers is Leftovers.UNKNOWN:
            return not self.cut_off
        return self.leftovers is Leftovers.SOME

    def is_unclean(self, *, lost: bool) -> bool:
        """Whether processes may be left. Unless it was ``lost``, a host that reports nothing has
        not started the job."""
        return self.leftovers is Leftovers.SOME or (lost and self.leftovers is Leftovers.UNKNOWN)


def attached(host: str) -> LinkState:
    """The state of a host whose workers run already."""
    return LinkState(host, HostPhase.RUNNING, shown=ShownState.ATTACHING, cut_off=True)


_Step = tuple[LinkState, list[LinkAction]]


def step(state: LinkState, event: LinkEvent) -> _Step:
    """Return the state after ``event`` and the actions to carry out, in order."""
    state, actions = TABLE[type(event)][_COLUMN[state.phase]](state, event)
    for action in actions:
        if isinstance(action, Show):
            state = replace(state, shown=action.state)
    return state, actions


# Transitions --------------------------------------------------------------------------------------


def _ignore(state: LinkState, event: Any) -> _Step:
    return state, []


def _show_step(state: LinkState, event: Connecting) -> _Step:
    return state, [Show(event.step)]


def _request(state: LinkState, event: Requested) -> _Step:
    return replace(state, phase=HostPhase.PREPARING), [Show(ShownState.PREPARING)]


def _check(state: LinkState, event: CheckFailed) -> _Step:
    shown: list[LinkAction] = [Show(ShownState.FAILED, event.reason)] if event.reason else []
    return _over(state), [*shown, Post(machine.HostRefused(state.host))]


def _start(state: LinkState, event: machine.StartHost) -> _Step:
    command: Start = {"op": "start"}
    state = replace(state, phase=HostPhase.RUNNING, command=command)
    return state, [Show(ShownState.RUNNING), Send(command)]


def _stop(state: LinkState, event: StopWorkers) -> _Step:
    command: Stop = {"op": "stop", "grace": event.grace, "reason": event.reason}
    state = replace(state, phase=HostPhase.STOPPING, command=command)
    return state, [Show(ShownState.STOPPING), Send(command)]


def _kill(state: LinkState, event: machine.KillHost | SupervisorTimedOut) -> _Step:
    command: Kill = {"op": "kill"}
    state = replace(state, phase=HostPhase.STOPPING, command=command)
    return state, [Send(command)]


def _discard(state: LinkState, event: machine.KillHost) -> _Step:
    return state, [Send({"op": "kill"})]


def _forget(state: LinkState, event: machine.AbortHost) -> _Step:
    ended = Post(machine.HostEnded(state.host))
    return _over(state), [Disconnect(), Show(ShownState.ENDED), ended]


def _abort(state: LinkState, event: machine.AbortHost) -> _Step:
    return replace(state, phase=HostPhase.ABORTING), [Send({"op": "abort"})]


def _close(state: LinkState, event: Close) -> _Step:
    return replace(state, phase=HostPhase.CLOSED), []


def _settle(state: LinkState, event: Settle) -> _Step:
    if not event.lost and state.shown not in (ShownState.ENDED, ShownState.FAILED):
        return state, [Show(ShownState.ENDED)]
    if event.lost and state.shown not in (
        ShownState.LOST,
        ShownState.UNREACHABLE,
        ShownState.FAILED,
    ):
        return state, [Show(ShownState.LOST, "did not confirm that the job's processes ended")]
    return state, []


def _prepared(state: LinkState, event: messages.Prepared) -> _Step:
    return state, [Show(ShownState.READY), Post(machine.HostReady(state.host))]


def _follow(state: LinkState, event: messages.Attached) -> _Step:
    resend: list[LinkAction] = [Send(state.command)] if state.command is not None else []
    show = state.end or Show(ShownState.STOPPING if state.stopping else ShownState.RUNNING)
    return replace(state, cut_off=False), [show, *resend]


def _refuse(state: LinkState, event: messages.Refused) -> _Step:
    error = problems.refused(state.host, "preparing the job", event)
    return _cannot_prepare(_record_missing_run(state, event), error)


def _refuse_to_follow(state: LinkState, event: messages.Refused) -> _Step:
    error = problems.refused(state.host, "attaching to the job", event)
    state = replace(_over(_record_missing_run(state, event)), cut_off=False)
    if event.what == "gone":
        return state, [Show(ShownState.ENDED), Post(machine.HostEnded(state.host), error)]
    return state, [Post(machine.HostLost(state.host), error)]


def _record_missing_run(state: LinkState, event: messages.Refused) -> LinkState:
    return replace(state, leftovers=Leftovers.NO_RUN) if event.what == "gone" else state


def _supervisor_died(state: LinkState, event: messages.Lost) -> _Step:
    error = problems.supervisor_died(state.host, event)
    show = Show(ShownState.LOST, error.reason)
    state = replace(_survived(state, event.survivors), end=show)
    return _drain(state), [show, Post(machine.HostLost(state.host), error)]


def _ended_late(state: LinkState, event: messages.Lost) -> _Step:
    # Processes survived the end of the run. The relay has ended them now, or not.
    return _survived(state, event.survivors), []


def _survived(state: LinkState, survivors: Sequence[messages.Survivor]) -> LinkState:
    return replace(state, leftovers=Leftovers.SOME if survivors else Leftovers.NONE)


def _bye(state: LinkState, event: messages.Bye) -> _Step:
    ended = Post(machine.HostEnded(state.host))
    return _over(_survived(state, ())), [Show(ShownState.ENDED), ended]


def _bye_early(state: LinkState, event: messages.Bye) -> _Step:
    return _reject(state, Malformed(ProtocolError("bye: the job has not ended on this host")))


def _finish(state: LinkState, event: messages.Bye) -> _Step:
    return _over(state), []


def _refuse_output(state: LinkState, event: messages.Refused) -> _Step:
    return _over(state), [Post(None, PrepareError(state.host, _RECEIVING, event.reason))]


def _stopped_itself(state: LinkState, event: messages.Stopping) -> _Step:
    if event.asked:
        return replace(state, stop_reason=event.reason), []
    return state, [Post(None, PrepareError(state.host, "running the job", event.reason))]


def _end(state: LinkState, event: messages.Ended) -> _Step:
    error = problems.ended_badly(state.host, event)
    show = Show(ShownState.ENDED)
    state = replace(_survived(state, event.survivors), end=show)
    return _drain(state), [show, Post(machine.HostEnded(state.host), error)]


def _fail_early(state: LinkState, event: Unreachable) -> _Step:
    return _cannot_prepare(state, event.error)


def _cut_off(state: LinkState, event: Unreachable) -> _Step:
    state = _without_relay(state, event.error)
    return state, [Show(ShownState.UNREACHABLE, event.error.reason)]


def _cut_off_late(state: LinkState, event: Unreachable) -> _Step:
    # `cut_off` stays False: a host that could report its end, but did not, stays in doubt.
    return state, [Show(ShownState.UNREACHABLE, event.error.reason)]


def _give_up(state: LinkState, event: TimedOut) -> _Step:
    state = _without_relay(state, event.error)
    return _over(state), [Post(machine.HostLost(state.host), event.error)]


def _without_relay(state: LinkState, error: NodeError) -> LinkState:
    """A host that answers, but where the relay does not run, is not cut off."""
    return replace(state, cut_off=isinstance(error, ConnectError))


def _give_up_output(state: LinkState, event: TimedOut) -> _Step:
    return _over(state), [Post(None, ConnectError(state.host, _RECEIVING, event.error.reason))]


def _give_up_supervisor(state: LinkState, event: SupervisorTimedOut) -> _Step:
    state, actions = _kill(state, event)
    return _drain(state), [*actions, Post(machine.HostLost(state.host), event.error)]


def _reject_early(state: LinkState, event: Malformed) -> _Step:
    state, actions = _cannot_prepare(
        state, AnswerError(state.host, "preparing the job", event.error)
    )
    return state, [Send({"op": "kill"}), *actions]


def _reject(state: LinkState, event: Malformed) -> _Step:
    error = AnswerError(state.host, "following the job", event.error)
    lost = Post(machine.HostLost(state.host), error)
    failed = Show(ShownState.FAILED, error.reason)
    return _distrusted(state), [Send({"op": "kill"}), failed, lost]


def _reject_late(state: LinkState, event: Malformed) -> _Step:
    error = AnswerError(state.host, "following the job", event.error)
    return _distrusted(state), [Send({"op": "kill"}), Post(None, error)]


def _distrusted(state: LinkState) -> LinkState:
    """What a host that breaks the protocol has reported may be wrong as well."""
    return replace(_over(state), leftovers=Leftovers.UNKNOWN, cut_off=False)


def _fail(state: LinkState, event: LinkFailed) -> _Step:
    failed = Post(machine.LauncherFailed(), event.error)
    lost = Post(machine.HostLost(state.host))
    return _over(state), [failed, Send({"op": "kill"}), lost]


def _fail_late(state: LinkState, event: LinkFailed) -> _Step:
    return state, [Post(machine.LauncherFailed(), event.error)]


def _cannot_prepare(state: LinkState, error: NodeError) -> _Step:
    shown: list[LinkAction] = [Show(ShownState.FAILED, error.reason)]
    if isinstance(error, PortBusyError) and state.movable_port:
        shown = []
    return _over(state), [*shown, Post(machine.HostRefused(state.host), error)]


def _drain(state: LinkState) -> LinkState:
    return replace(state, phase=HostPhase.DRAINING)


def _over(state: LinkState) -> LinkState:
    return replace(state, phase=HostPhase.OVER)


_Row = tuple[Callable[[LinkState, Any], _Step], ...]
_COLUMN = {phase: number for number, phase in enumerate(HostPhase)}
# fmt: off
TABLE: dict[type[LinkEvent], _Row] = {
    # CONNECTING PREPARING ABORTING RUNNING STOPPING DRAINING OVER CLOSED
    machine.StartHost: (
        _ignore, _start, _ignore, _ignore, _ignore, _ignore, _ignore, _ignore),
    StopWorkers: (
        _ignore, _ignore, _ignore, _stop, _stop, _ignore, _ignore, _ignore),
    machine.KillHost: (
        _ignore, _discard, _discard, _kill, _kill, _ignore, _ignore, _ignore),
    machine.AbortHost: (
        _forget, _abort, _abort, _ignore, _ignore, _ignore, _ignore, _ignore),
    Settle: (
        _settle, _settle, _settle, _settle, _settle, _settle, _settle, _settle),
    Close: (
        _close, _close, _close, _close, _close, _close, _close, _close),
    Connecting: (
        _show_step, _ignore, _ignore, _ignore, _ignore, _ignore, _ignore, _ignore),
    CheckFailed: (
        _check, _ignore, _ignore, _ignore, _ignore, _ignore, _ignore, _ignore),
    Requested: (
        _request, _ignore, _ignore, _ignore, _ignore, _ignore, _ignore, _ignore),
    Unreachable: (
        _fail_early, _fail_early, _fail_early, _cut_off, _cut_off, _cut_off_late, _ignore,
        _ignore),
    TimedOut: (
        _ignore, _ignore, _ignore, _give_up, _give_up, _give_up_output, _ignore, _ignore),
    SupervisorTimedOut: (
        _ignore, _ignore, _ignore, _give_up_supervisor, _give_up_supervisor, _ignore, _ignore,
        _ignore),
    Malformed: (
        _reject_early, _reject_early, _reject_early, _reject, _reject, _reject_late,
        _reject_late, _ignore),
    LinkFailed: (
        _fail, _fail, _fail, _fail, _fail, _fail_late, _fail_late, _fail_late),
    messages.Prepared: (
        _ignore, _prepared, _ignore, _ignore, _ignore, _ignore, _ignore, _ignore),
    messages.Attached: (
        _ignore, _ignore, _ignore, _follow, _follow, _follow, _ignore, _ignore),
    messages.Refused: (
        _ignore, _refuse, _refuse, _refuse_to_follow, _refuse_to_follow, _refuse_output, _ignore,
        _ignore),
    messages.Lost: (
        _ignore, _supervisor_died, _supervisor_died, _supervisor_died, _supervisor_died,
        _ended_late, _ignore, _ignore),
    messages.Bye: (
        _ignore, _bye, _bye, _bye_early, _bye, _finish, _ignore, _ignore),
    messages.Stopping: (
        _ignore, _ignore, _ignore, _stopped_itself, _ignore, _ignore, _ignore, _ignore),
    messages.Ended: (
        _ignore, _ignore, _ignore, _end, _end, _ignore, _ignore, _ignore),
}
# fmt: on
