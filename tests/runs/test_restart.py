"""Whether and where a failed job restarts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from dtrain.messages.decode import decode
from dtrain.runs import restart
from dtrain.runs.restart import AttemptResult, GiveUp, Retry, next_attempt
from dtrain.spec.elastic import without
from dtrain.spec.load import parse
from dtrain.spec.model import Elastic, Restart


def failed(step: int | None = None, culprit: str | None = "a", *lost: str) -> AttemptResult:
    return AttemptResult(ran=True, step=step, culprit=culprit, lost=frozenset(lost))


def decide(
    policy: Restart,
    history: Sequence[AttemptResult],
    spares: Sequence[str] = (),
    *,
    hosts: int = 4,
    min_hosts: int | None = None,
    fits: Callable[[str, str], bool] = lambda host, spare: True,
) -> Retry | GiveUp:
    elastic = None if min_hosts is None else Elastic(min_hosts)
    return restart.decide(policy, history, spares, hosts=hosts, elastic=elastic, fits=fits)


def test_a_result_that_an_older_version_has_recorded() -> None:
    """There, ``final`` was true or false: an attempt that follows was not the last one."""
    older = {"ran": True, "final": False, "step": 3, "culprit": "a", "lost": ["a"], "seconds": 9}
    assert decode(AttemptResult, older, "attempt") == replace(failed(3, "a", "a"), seconds=9)


def test_restarts_are_off_by_default() -> None:
    assert decide(Restart(0), [failed()], ["s"]) == GiveUp("")


def test_a_hang_ends_a_job_that_must_stop_on_hangs() -> None:
    hung = AttemptResult(ran=True, step=3, culprit=None, why_last="it must stop")
    assert decide(Restart(9), [hung], ["s"]) == GiveUp("it must stop")
    assert decide(Restart(0), [hung], ["s"]) == GiveUp("")


def test_the_number_of_restarts_and_their_growing_delays() -> None:
    policy = Restart(max=9)
    history: list[AttemptResult] = []
    delays = []
    for number in range(9):
        history.append(failed(step=number, culprit=None))
        decision = decide(policy, history, [])
        assert isinstance(decision, Retry)
        delays.append(decision.delay)
    assert delays == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    history.append(failed(step=99, culprit=None))
    decision = decide(policy, history, [])
    assert isinstance(decision, GiveUp)
    assert "10 times" in decision.why


def test_a_lost_host_is_replaced_at_once() -> None:
    by_any = restart.decide(Restart(3), [failed(5, None, "b")], ["s1"], hosts=2)
    assert by_any == Retry(1.0, {"b": "s1"})
    decision = decide(Restart(3), [failed(5, None, "b")], ["s1", "s2"])
    assert decision == Retry(1.0, {"b": "s1"})
    decision = decide(Restart(3), [failed(5, "a", "b", "c")], ["s1", "s2"])
    assert decision == Retry(1.0, {"b": "s1", "c": "s2"})


def test_only_a_spare_that_fits_takes_a_place() -> None:
    lost = [failed(5, None, "b4", "c8")]
    decision = decide(
        Restart(3), lost, ["s8", "t8", "u4"], fits=lambda host, spare: host[1] == spare[1]
    )
    assert decision == Retry(1.0, {"b4": "u4", "c8": "s8"})
    decision = decide(Restart(3), lost, ["s8"], fits=lambda host, spare: host[1] == spare[1])
    assert decision == Retry(1.0, {"c8": "s8"})


def test_a_host_that_fails_first_twice_running_is_replaced() -> None:
    policy = Restart(5)
    assert decide(policy, [failed(1, "b")], ["s"]) == Retry(1.0, {})
    assert decide(policy, [failed(1, "b"), failed(2, "b")], ["s"]) == Retry(2.0, {"b": "s"})
    assert decide(policy, [failed(1, "a"), failed(2, "b")], ["s"]) == Retry(2.0, {})
    assert decide(policy, [failed(1, None), failed(2, None)], ["s"]) == Retry(2.0, {})
    # Only the last two attempts count.
    last_two = [failed(1, "a"), failed(2, "b"), failed(3, "b")]
    assert decide(policy, last_two, ["s"]) == Retry(4.0, {"b": "s"})
    apart = [failed(1, "b"), failed(2, "a"), failed(3, "b")]
    assert decide(policy, apart, ["s"]) == Retry(4.0, {})
    # It is replaced once, not twice, when it is lost as well.
    assert decide(policy, [failed(1, "b"), failed(2, "b", "b")], ["s", "t"]) == Retry(
        2.0, {"b": "s"}
    )


def test_a_lost_host_without_a_spare_is_retried() -> None:
    assert decide(Restart(3), [failed(5, None, "b")], []) == Retry(1.0, {})


def test_three_failures_at_one_step_are_no_accident() -> None:
    policy = Restart(99)
    same = [failed(40, "a"), failed(40, "b"), failed(40, "c")]
    assert isinstance(decide(policy, same[:2], []), Retry)
    decision = decide(policy, same, [])
    assert decision == GiveUp("the last 3 attempts all failed at step 40")
    assert isinstance(decide(policy, [*same[:2], failed(41, "c")], []), Retry)
    assert isinstance(decide(policy, [failed(7, "a"), *same], []), GiveUp)
    never = [failed(None, "a"), failed(None, "b"), failed(None, "c")]
    assert decide(policy, never, []) == GiveUp(
        "the last 3 attempts all failed before the first step"
    )
    # A job without step reports may have run for days each time.
    long = [replace(attempt, seconds=restart.SOON) for attempt in never]
    assert isinstance(decide(policy, long, []), Retry)
    short = [replace(attempt, seconds=restart.SOON - 1.0) for attempt in never]
    assert isinstance(decide(policy, short, []), GiveUp)
    # Losing hosts is no fault of the job's.
    lost = [failed(40, None, "b")] * 3
    assert isinstance(decide(policy, lost, ["s"]), Retry)


def test_a_job_that_a_host_refuses_is_not_retried() -> None:
    refused = AttemptResult(ran=False, step=None, culprit=None)
    assert isinstance(decide(Restart(3), [refused], ["s"]), GiveUp)


def test_a_host_that_cannot_be_reached_at_the_start() -> None:
    dead = AttemptResult(ran=False, step=None, culprit=None, lost=frozenset({"b"}))
    assert decide(Restart(3), [dead], ["s"]) == Retry(1.0, {"b": "s"})
    decision = decide(Restart(3), [dead], [])
    assert isinstance(decision, GiveUp)
    assert "no spare" in decision.why


def test_an_elastic_job_continues_without_a_lost_host() -> None:
    policy = Restart(3)
    assert decide(policy, [failed(5, None, "b")], min_hosts=3) == Retry(1.0, {}, ("b",))
    # A spare is better.
    lost_two = [failed(5, None, "b", "c")]
    assert decide(policy, lost_two, ["s"], min_hosts=3) == Retry(1.0, {"b": "s"}, ("c",))
    dead = AttemptResult(ran=False, step=None, culprit=None, lost=frozenset({"b"}))
    assert decide(policy, [dead], min_hosts=3) == Retry(1.0, {}, ("b",))


def test_an_elastic_job_gives_up_below_its_fewest_hosts() -> None:
    lost_two = [failed(5, None, "b", "c")]
    assert decide(Restart(3), lost_two, min_hosts=3) == GiveUp(
        "2 hosts are left, and job.elastic.min_hosts is 3"
    )
    assert decide(Restart(3), lost_two, hosts=3, min_hosts=2) == GiveUp(
        "1 host is left, and job.elastic.min_hosts is 2"
    )


def test_an_elastic_job_drops_a_host_that_fails_first_twice_running_if_it_can() -> None:
    twice = [failed(1, "b"), failed(2, "b")]
    assert decide(Restart(5), twice[:1], min_hosts=3) == Retry(1.0)
    assert decide(Restart(5), twice, min_hosts=3) == Retry(2.0, {}, ("b",))
    assert decide(Restart(5), twice, min_hosts=2) == Retry(2.0, {}, ("b",))
    assert decide(Restart(5), twice, min_hosts=4) == Retry(2.0)
    # The lost one goes first.
    both = [failed(1, "b"), failed(2, "b", "c")]
    assert decide(Restart(5), both, min_hosts=3) == Retry(2.0, {}, ("c",))


def test_the_description_of_the_next_attempt() -> None:
    spec = parse(
        """
cluster: {hosts: "gpu[01-04]", spares: [s], gpus: 2}
job:
  framework: torch
  script: train.py
  layout: {tensor: 2, pipeline: 2, data: 2}
  training: {global_batch: 16}
  restart: {max: 3}
  elastic: {min_hosts: 2}
""",
        "cluster.yaml",
    )
    one_less = without(spec, {"gpu03"})
    assert next_attempt(Retry(1.0, {}, ("gpu03",)), 2, spec, one_less, 4) == (
        "attempt 2 starts in 1 s without gpu03: 2 of 4 hosts, data 1 instead of 2; "
        "gpu04 idle, because the layout does not need it"
    )
    two_less = without(spec, {"gpu01", "gpu03"})
    assert next_attempt(Retry(2.0, {}, ("gpu01",)), 3, one_less, two_less, 4) == (
        "attempt 3 starts in 2 s without gpu01: 2 of 4 hosts; gpu04 in use again"
    )
    assert next_attempt(Retry(1.0, {"gpu02": "s"}), 2, spec, spec, 4) == (
        "attempt 2 starts in 1 s; s replaces gpu02"
    )
