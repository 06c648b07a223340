"""The state machine of one host: every reachable state, and every event in it."""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import product
from typing import get_args

import pytest

from dtrain.diagnostics import ConnectError, InternalError, PortBusyError
from dtrain.engines.ssh import machine
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
from dtrain.engines.ssh.host_state import TABLE, HostPhase, Leftovers, LinkState, attached, step
from dtrain.messages import agent as messages
from dtrain.messages.decode import ProtocolError
from support.walk import transitions

ERROR = ConnectError("a", "following the job", "it broke")
GONE = messages.Refused("gone", "no run")
BUSY = messages.Refused("port", "port 29500 is taken")
SURVIVOR = messages.Survivor(9, "python3")
EVENTS: list[LinkEvent] = [
    machine.StartHost("a"),
    StopWorkers(3.0, "rank 1 failed"),
    machine.KillHost("a"),
    machine.AbortHost("a"),
    Settle(lost=False),
    Settle(lost=True),
    Close(),
    Connecting("syncing"),
    CheckFailed(""),
    CheckFailed("no GPU"),
    Requested(),
    Unreachable(ERROR),
    TimedOut(ERROR),
    SupervisorTimedOut(ERROR),
    Malformed(ProtocolError("wrong")),
    LinkFailed(InternalError("a fault")),
    messages.Prepared(),
    messages.Attached(),
    GONE,
    BUSY,
    messages.Lost("it died"),
    messages.Lost("it died", (SURVIVOR,)),
    messages.Bye(),
    messages.Stopping(1.0, "its lease ended"),
    messages.Ended(1.0, ()),
    messages.Ended(1.0, (SURVIVOR,)),
]
ENDS = machine.HostRefused | machine.HostEnded | machine.HostLost


@functools.cache
def walk() -> list[tuple[LinkState, LinkEvent, LinkState, list[LinkAction]]]:
    return transitions(
        [LinkState("a"), LinkState("a", movable_port=True), attached("a")], EVENTS, step
    )


def run(state: LinkState, *events: LinkEvent) -> tuple[LinkState, list[LinkAction]]:
    """The state after all events, and the actions of the last."""
    actions: list[LinkAction] = []
    for event in events:
        state, actions = step(state, event)
    return state, actions


def preparing(*, movable_port: bool = False) -> LinkState:
    return run(LinkState("a", movable_port=movable_port), Requested())[0]


def running() -> LinkState:
    return run(preparing(), messages.Prepared(), machine.StartHost("a"))[0]


def posts(actions: list[LinkAction]) -> list[Post]:
    return [action for action in actions if isinstance(action, Post)]


def commands(actions: list[LinkAction]) -> list[str]:
    return [action.command["op"] for action in actions if isinstance(action, Send)]


def test_the_walk_meets_every_cell_of_the_table() -> None:
    assert set(TABLE) == set(get_args(LinkEvent))
    assert all(len(row) == len(HostPhase) for row in TABLE.values())
    met = {(state.phase, type(event)) for state, event, *_ in walk()}
    assert met == set(product(HostPhase, get_args(LinkEvent)))


def test_the_end_is_posted_once() -> None:
    for state, _, after, actions in walk():
        ends = [post for post in posts(actions) if isinstance(post.event, ENDS)]
        assert len(ends) == (after.reported_end and not state.reported_end), (state, actions)


def test_only_a_prepared_host_starts_and_no_aborted_one() -> None:
    for state, event, after, actions in walk():
        if "start" in commands(actions):
            assert after.started
            repeated = isinstance(event, messages.Attached) and state.started
            assert repeated or state.phase is HostPhase.PREPARING


def test_a_closed_link_stays_closed_and_is_silent() -> None:
    for state, event, after, actions in walk():
        if state.phase is HostPhase.CLOSED:
            assert after.phase is HostPhase.CLOSED
            assert commands(actions) == []
            if not isinstance(event, Settle | LinkFailed):
                assert actions == []


def test_the_phases_only_go_forward() -> None:
    order = list(HostPhase)
    for state, _, after, _ in walk():
        assert order.index(after.phase) >= order.index(state.phase)


def test_a_settled_host_has_a_final_state() -> None:
    for _, event, after, _ in walk():
        if isinstance(event, Settle):
            final = ("lost", "unreachable", "failed") if event.lost else ("ended", "failed")
            assert after.shown in final


def test_a_host_that_goes_well() -> None:
    state, actions = run(LinkState("a"), Requested())
    assert actions == [Show("preparing")]
    state, actions = run(state, messages.Prepared())
    assert actions == [Show("ready"), Post(machine.HostReady("a"))]
    state, actions = run(state, machine.StartHost("a"))
    assert actions == [Show("running"), Send({"op": "start"})]
    state, actions = run(state, messages.Ended(1.0, ()))
    assert actions == [Show("ended"), Post(machine.HostEnded("a"))]
    state, actions = run(state, messages.Bye())
    assert (state.phase, state.leftovers, actions) == (HostPhase.OVER, Leftovers.NONE, [])


def test_a_relay_ends_what_survived_the_end_of_the_run() -> None:
    state = LinkState("a", phase=HostPhase.RUNNING)
    state, _ = run(state, messages.Ended(1.0, (SURVIVOR,)))
    assert state.is_unclean(lost=False)
    state, actions = run(state, messages.Lost("processes of the run survived its end"))
    assert not state.is_unclean(lost=True)
    assert actions == []


def test_an_abort_before_the_request_closes_the_connection() -> None:
    state, actions = run(LinkState("a"), machine.AbortHost("a"))
    assert actions == [Disconnect(), Show("ended"), Post(machine.HostEnded("a"))]
    assert run(state, Requested()) == (state, [])


def test_an_abort_after_the_request_waits_for_the_host() -> None:
    state, actions = run(preparing(), machine.AbortHost("a"))
    assert actions == [Send({"op": "abort"})]
    assert run(state, messages.Bye())[1] == [Show("ended"), Post(machine.HostEnded("a"))]


def test_the_last_command_is_repeated_to_a_new_relay() -> None:
    stop = StopWorkers(3.0, "rank 1 failed")
    state, actions = run(running(), Unreachable(ERROR), stop)
    state, actions = run(state, messages.Attached())
    assert actions == [
        Show("stopping"),
        Send({"op": "stop", "grace": 3.0, "reason": "rank 1 failed"}),
    ]


def test_a_broken_connection_ends_a_launch_but_not_a_job() -> None:
    refused = Post(machine.HostRefused("a"), ERROR)
    assert run(preparing(), Unreachable(ERROR))[1] == [Show("failed", "it broke"), refused]
    state, actions = run(running(), Unreachable(ERROR))
    assert actions == [Show("unreachable", "it broke")]
    assert state.started
    assert run(state, TimedOut(ERROR))[1] == [Post(machine.HostLost("a"), ERROR)]


def test_a_timeout_after_the_end_only_costs_output() -> None:
    actions = run(running(), messages.Ended(1.0, ()), TimedOut(ERROR))[1]
    (post,) = posts(actions)
    assert (post.event, post.problem.message, post.problem.hint) == (
        None,
        f"a: receiving the end of the output: {ERROR.reason}",
        "",
    )


def test_a_busy_port_that_can_move_is_no_failure_to_show() -> None:
    for movable in (False, True):
        _, actions = run(preparing(movable_port=movable), BUSY)
        assert any(isinstance(action, Show) for action in actions) is not movable
        assert isinstance(posts(actions)[0].problem, PortBusyError)


def test_a_bye_before_the_end_is_malformed() -> None:
    _, actions = run(running(), messages.Bye())
    assert commands(actions) == ["kill"]
    (post,) = posts(actions)
    assert isinstance(post.event, machine.HostLost)
    assert "the job has not ended on this host" in str(post.problem)


def test_a_silent_supervisor_is_killed_and_its_host_lost() -> None:
    state, actions = run(running(), SupervisorTimedOut(ERROR))
    assert commands(actions) == ["kill"]
    assert posts(actions) == [Post(machine.HostLost("a"), ERROR)]
    assert commands(run(state, messages.Attached())[1]) == ["kill"]


@pytest.mark.parametrize(
    ("event", "left", "lost"),
    [
        (GONE, Leftovers.NO_RUN, False),
        (messages.Refused("agent", "damaged"), Leftovers.UNKNOWN, True),
        (messages.Lost("it died"), Leftovers.NONE, True),
        (messages.Lost("it died", (SURVIVOR,)), Leftovers.SOME, True),
        (messages.Ended(1.0, ()), Leftovers.NONE, False),
        (messages.Ended(1.0, (SURVIVOR,)), Leftovers.SOME, False),
        (Malformed(ProtocolError("wrong")), Leftovers.UNKNOWN, True),
    ],
)
def test_leftovers_of_a_host_are_known(event: LinkEvent, left: Leftovers, *, lost: bool) -> None:
    state, actions = run(attached("a"), event)
    assert state.leftovers is left
    assert isinstance(posts(actions)[0].event, machine.HostLost) is lost


def test_a_host_that_breaks_the_protocol_has_confirmed_nothing() -> None:
    state, _ = run(running(), messages.Ended(1.0, ()), Malformed(ProtocolError("wrong")))
    assert state.leftovers is Leftovers.UNKNOWN


def test_a_host_is_cut_off_until_it_answers() -> None:
    assert attached("a").cut_off
    assert not running().cut_off
    cut_off, _ = run(running(), Unreachable(ERROR))
    assert cut_off.cut_off
    assert run(cut_off, TimedOut(ERROR))[0].cut_off
    answers = (messages.Attached(), GONE, Malformed(ProtocolError("wrong")))
    assert not any(run(cut_off, answer)[0].cut_off for answer in answers)


def test_the_reason_of_a_dead_supervisor_stays_on_display() -> None:
    state, actions = run(running(), messages.Lost("it died"))
    assert actions[0] == Show("lost", "it died")
    assert run(state, Settle(lost=True))[1] == []


@pytest.mark.parametrize("end", [messages.Ended(1.0, ()), messages.Lost("it died")])
def test_a_host_that_has_ended_does_not_run_again_after_a_lost_connection(end: LinkEvent) -> None:
    state, (shown, *_) = run(running(), end)
    state, _ = run(state, Unreachable(ERROR))
    assert run(state, messages.Attached())[1][0] == shown


def test_a_run_folder_that_is_gone_after_the_end_only_costs_output() -> None:
    state, actions = run(running(), messages.Ended(1.0, ()), Unreachable(ERROR), GONE)
    (post,) = posts(actions)
    assert (post.event, str(post.problem)) == (None, "a: receiving the end of the output: no run")
    assert (state.phase, state.leftovers) == (HostPhase.OVER, Leftovers.NONE)


def test_the_reason_of_a_node_that_stops_by_itself_is_reported() -> None:
    stopping = messages.Stopping(1.0, "its lease ended")
    assert "its lease ended" in str(posts(run(running(), stopping)[1])[0].problem)
    assert run(running(), machine.KillHost("a"), stopping)[1] == []
    state, actions = run(running(), replace(stopping, asked=True))
    assert (state.stop_reason, actions) == ("its lease ended", [])
