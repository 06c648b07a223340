"""Whether a failed job is started again, and where."""

from __future__ import annotations

import json
from dataclasses import replace

from dtrain.restart import Again, Attempt, GiveUp, decide
from dtrain.spec.model import Restart


def failed(step: int | None = None, culprit: str | None = "a", *lost: str) -> Attempt:
    return Attempt(ran=True, step=step, culprit=culprit, lost=frozenset(lost))


def test_nobody_asked_for_restarts() -> None:
    assert decide(Restart(0), [failed()], ["s"]) == GiveUp("")


def test_a_hang_that_is_to_end_the_job_ends_it() -> None:
    hung = Attempt(ran=True, step=3, culprit=None, final=True)
    assert decide(Restart(9), [hung], ["s"]) == GiveUp("")


def test_as_often_as_was_asked_with_longer_and_longer_pauses() -> None:
    policy = Restart(max=9)
    history: list[Attempt] = []
    delays = []
    for number in range(9):
        history.append(failed(step=number, culprit=None))
        decision = decide(policy, history, [])
        assert isinstance(decision, Again)
        delays.append(decision.delay)
    assert delays == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    history.append(failed(step=99, culprit=None))
    decision = decide(policy, history, [])
    assert isinstance(decision, GiveUp)
    assert "10 times" in decision.why


def test_a_lost_host_is_replaced_at_once() -> None:
    decision = decide(Restart(3), [failed(5, None, "b")], ["s1", "s2"])
    assert decision == Again(1.0, {"b": "s1"})
    decision = decide(Restart(3), [failed(5, "a", "b", "c")], ["s1", "s2"])
    assert decision == Again(1.0, {"b": "s1", "c": "s2"})


def test_a_host_that_fails_first_twice_running_is_replaced() -> None:
    policy = Restart(5)
    assert decide(policy, [failed(1, "b")], ["s"]) == Again(1.0, {})
    assert decide(policy, [failed(1, "b"), failed(2, "b")], ["s"]) == Again(2.0, {"b": "s"})
    assert decide(policy, [failed(1, "a"), failed(2, "b")], ["s"]) == Again(2.0, {})
    assert decide(policy, [failed(1, None), failed(2, None)], ["s"]) == Again(2.0, {})
    # It is replaced once, not twice, when it is lost as well.
    assert decide(policy, [failed(1, "b"), failed(2, "b", "b")], ["s", "t"]) == Again(
        2.0, {"b": "s"}
    )


def test_a_lost_host_without_a_spare_is_tried_again() -> None:
    assert decide(Restart(3), [failed(5, None, "b")], []) == Again(1.0, {})


def test_three_failures_at_one_step_are_no_accident() -> None:
    policy = Restart(99)
    same = [failed(40, "a"), failed(40, "b"), failed(40, "c")]
    assert isinstance(decide(policy, same[:2], []), Again)
    decision = decide(policy, same, [])
    assert decision == GiveUp("the last 3 attempts all failed at step 40")
    assert isinstance(decide(policy, [*same[:2], failed(41, "c")], []), Again)
    never = [failed(None, "a"), failed(None, "b"), failed(None, "c")]
    assert decide(policy, never, []) == GiveUp(
        "the last 3 attempts all failed before the first step"
    )
    # A job that tells of no steps may have run for days each time.
    days = [replace(attempt, seconds=1e6) for attempt in never]
    assert isinstance(decide(policy, days, []), Again)
    # Losing hosts is no fault of the job's.
    lost = [failed(40, None, "b")] * 3
    assert isinstance(decide(policy, lost, ["s"]), Again)


def test_attempts_are_kept_in_the_journal() -> None:
    attempt = replace(failed(3, "a", "b"), seconds=2.5)
    assert Attempt.from_json(json.loads(json.dumps(attempt.as_json()))) == attempt


def test_a_job_that_a_host_refuses_is_not_tried_again() -> None:
    refused = Attempt(ran=False, step=None, culprit=None)
    assert isinstance(decide(Restart(3), [refused], ["s"]), GiveUp)


def test_a_host_that_cannot_be_reached_at_the_start() -> None:
    dead = Attempt(ran=False, step=None, culprit=None, lost=frozenset({"b"}))
    assert decide(Restart(3), [dead], ["s"]) == Again(1.0, {"b": "s"})
    decision = decide(Restart(3), [dead], [])
    assert isinstance(decision, GiveUp)
    assert "no spare" in decision.why
