"""Who stands still, from counts of steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dtrain.failures.stalls import LEAST, Stall, StallDetector

RANKS = 4


class Job:
    """Ranks whose steps take 0.5 s each."""

    def __init__(self, ranks: int = RANKS) -> None:
        self.detector = StallDetector(ranks)
        self.ranks = ranks
        self.now = 0.0
        self.done = [0] * ranks

    def train(self, steps: int, without: int | None = None, seconds: float = 0.5) -> None:
        for _ in range(steps):
            self.now += seconds
            for rank in range(self.ranks):
                self.done[rank] += rank != without
                self.say(rank, None)

    def say(self, rank: int, waits: str | None) -> None:
        self.detector.add(f"rank-{rank}", f"node{rank // 2}", self.done[rank], waits, self.now)

    def stand(self, seconds: float = LEAST) -> Stall | None:
        self.now += seconds
        return self.detector.find(self.now)


def test_the_rank_that_computes_while_the_others_wait() -> None:
    job = Job()
    job.train(100)
    for rank in range(RANKS):
        job.say(rank, "ranks" if rank != 2 else "")
    stall = job.stand()
    assert stall == Stall(("rank-2",), ("node1",), LEAST, 100, 3)
    assert str(stall) == "rank 2 on node1 stands still after step 100, for 15 s; 3 wait for it"


def test_the_rank_that_waits_for_its_data() -> None:
    job = Job()
    job.train(100)
    for rank in range(RANKS):
        job.say(rank, "ranks" if rank != 3 else "data")
    stall = job.stand()
    assert stall is not None
    assert stall.processes == ("rank-3",)


def test_the_rank_that_is_left_after_the_others_have_ended() -> None:
    job = Job()
    job.train(20)
    job.train(80, without=1)
    for rank in (0, 2, 3):
        job.detector.remove(f"rank-{rank}")
    stall = job.stand()
    assert stall is not None
    assert (stall.processes, stall.step) == (("rank-1",), 20)


def test_the_rank_that_is_behind() -> None:
    job = Job()
    job.train(100)
    job.train(1, without=1)
    stall = job.stand()
    assert stall is not None
    assert (stall.processes, stall.step) == (("rank-1",), 100)


def test_of_the_ranks_behind_the_last_one_is_named() -> None:
    """Ranks that wait for it may have got further than others, and not say that they wait."""
    job = Job()
    job.train(100)
    job.train(1, without=1)
    job.done[3] += 1
    job.say(3, None)
    stall = job.stand()
    assert stall is not None
    assert (stall.processes, stall.step) == (("rank-1",), 100)


def test_hosts_are_in_the_order_of_their_numbers() -> None:
    job = Job(22)
    job.train(100)
    for rank in range(22):
        job.say(rank, "" if rank > 3 else "ranks")
    stall = job.stand()
    assert stall is not None
    assert "and 14 more on node[2-10] stand still" in str(stall)


def test_of_the_ranks_behind_the_one_that_waits_is_no_cause() -> None:
    job = Job()
    job.train(100)
    job.done[0] += 1
    for rank in range(RANKS):
        job.say(rank, "" if rank == 3 else "ranks")
    stall = job.stand()
    assert stall is not None
    assert stall.processes == ("rank-3",)


def test_a_rank_that_stands_while_others_advance() -> None:
    job = Job()
    job.train(100)
    job.train(40, without=0)
    stall = job.detector.find(job.now)
    assert stall is not None
    assert (stall.processes, stall.step, stall.seconds) == (("rank-0",), 100, 20.0)


def test_a_job_that_stands_without_a_culprit() -> None:
    job = Job()
    job.train(100)
    assert job.stand(LEAST - 1) is None
    stall = job.stand(1)
    assert stall is not None
    assert stall.processes == ()
    assert str(stall) == "no rank has done a step for 15 s, after step 100"
    long = replace(stall, seconds=1439.0)
    assert str(long) == "no rank has done a step for 23 min, after step 100"
    job.train(1)
    assert job.detector.find(job.now) is None


def test_all_wait() -> None:
    job = Job()
    job.train(100)
    for rank in range(RANKS):
        job.say(rank, "ranks")
    stall = job.stand()
    assert stall is not None
    assert (stall.processes, stall.waiting) == ((), RANKS)


def test_long_steps_get_more_time() -> None:
    job = Job()
    job.train(20, seconds=60.0)
    assert job.stand(170) is None
    assert job.stand(20) is not None


def test_one_long_pause_makes_no_long_limit_but_may_come_again() -> None:
    job = Job()
    job.train(100)
    assert job.stand(40) is not None
    job.train(100)
    assert job.stand(50) is None  # an evaluation, as before
    assert job.stand(20) is not None


def test_processes_that_have_ended_do_not_count() -> None:
    job = Job()
    job.train(10)
    job.detector.remove("rank-1")
    job.train(1, without=1)
    assert job.stand(LEAST - 1) is None
    for rank in (0, 2, 3):
        job.detector.remove(f"rank-{rank}")
    assert job.stand(100) is None


def test_a_lost_connection_says_nothing() -> None:
    job = Job()
    job.train(10)
    job.now += 100
    job.detector.pause(job.now, 99)
    assert job.stand(LEAST - 2) is None
    assert job.stand(1) is not None


@pytest.mark.parametrize("ranks", [1, 2])
def test_before_the_first_step_nothing_stands(ranks: int) -> None:
    assert Job(ranks).stand(1000) is None


def test_forged_names_take_no_memory() -> None:
    detector = StallDetector(2)
    for rank in range(1000):
        detector.add(f"rank-{rank}", "node0", 1, "", 0.0)
        detector.remove(f"rank-{rank}")
    assert len(detector._processes) + len(detector._ended) <= 2
