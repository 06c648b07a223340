"""Whose fault it was."""

from __future__ import annotations

from dtrain.cause import Failure, in_order_of_blame


def failure(rank: int, time: float, **what: object) -> Failure:
    fields = {"code": 1} | what
    return Failure(host=f"n{rank}", role="worker", index=rank, rank=rank, time=time, **fields)  # type: ignore[arg-type]


def ranks(*failures: Failure) -> list[int | None]:
    return [each.rank for each in in_order_of_blame(failures)]


def test_the_earliest_comes_first() -> None:
    assert ranks(failure(1, 2.0), failure(0, 1.0)) == [0, 1]


def test_an_echo_comes_after_its_cause_even_if_it_was_heard_first() -> None:
    echo = failure(0, 1.0, message="RuntimeError: [gloo] Connection closed by peer [10.0.0.2]:1")
    assert ranks(echo, failure(1, 1.5, message="ValueError: bad batch")) == [1, 0]


def test_a_worker_told_to_end_comes_before_echoes_and_after_faults() -> None:
    echo = failure(0, 1.0, traceback="NCCL error: remote process exited or there was a network")
    told = failure(1, 1.1, code=None, signal="SIGTERM")
    fault = failure(2, 1.2, code=7)
    assert ranks(echo, told, fault) == [2, 1, 0]


def test_a_killed_worker_is_a_cause_whatever_it_said_before() -> None:
    killed = failure(3, 2.0, code=None, signal="SIGKILL", traceback="Connection reset by peer")
    echo = failure(0, 1.0, message="Connection closed by peer")
    assert ranks(echo, killed) == [3, 0]


def test_a_hint_where_what_was_said_explains_nothing() -> None:
    said = "terminate called without an active exception"
    aborted = failure(3, 0.0, signal="SIGABRT", traceback=said)
    assert "import torch.distributed.nn" in aborted.hint
    assert not failure(0, 0.0, message="ValueError: bad batch").hint


def test_words() -> None:
    assert failure(3, 0.0).who == "rank 3 on n3"
    assert failure(3, 0.0).how == "exited with status 1"
    assert failure(3, 0.0, code=None, signal="SIGSEGV").how == "was killed by SIGSEGV"
    ps = Failure("n0", "ps", 1, None, 0.0, signal="SIGKILL", out_of_memory=True)
    assert f"{ps.who} {ps.how}" == "ps1 on n0 was killed: the host ran out of memory"
