"""Slow ranks, from the times that simulated ranks measure."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest

from dtrain.failures.round_trips import RoundTripTimes
from dtrain.failures.stragglers import (
    Block,
    Cause,
    Seen,
    Straggler,
    StragglerDetector,
    causes_seen,
    seen_cause,
)
from dtrain.messages.telemetry import HEAT, GpuSample, RankUse, Sample
from dtrain.runtime.steps import STEPS

RANKS_PER_HOST = 8
NOISE = 0.05


class Job:
    """Lock-step ranks whose computation takes 1 s a step, with noise."""

    def __init__(self, ranks: int, seed: int = 0) -> None:
        self.detector = StragglerDetector(ranks)
        self.ranks = ranks
        self.blocks = 0
        self.wait = 0.2
        """Seconds in which all ranks wait, in each step."""
        self._random = random.Random(seed)

    def host(self, rank: int) -> str:
        return f"node{rank // min(RANKS_PER_HOST, max(1, self.ranks // 2))}"

    def seen(self, cause: Cause, ranks: Iterable[int]) -> Seen:
        """What the telemetry shows for some ranks."""
        return {(self.host(rank), f"rank-{rank}"): {cause} for rank in ranks}

    def run(
        self,
        steps: int,
        slower: Callable[[int], float] = lambda rank: 1.0,
        *,
        data: Callable[[int], float] = lambda rank: 0.0,
        queued: Callable[[int], float] = lambda rank: 0.0,
        known: bool = True,
    ) -> Straggler | None:
        """The ranks that are slow after ``steps`` more steps, or as soon as there are any."""
        for _ in range(steps // STEPS):
            # The standard error of the mean that a rank reports.
            noise = [self._random.gauss(0, NOISE / STEPS**0.5) for _ in range(self.ranks)]
            busy = [(1 + noise[rank]) * slower(rank) for rank in range(self.ranks)]
            whole = max(busy[rank] + data(rank) for rank in range(self.ranks)) + self.wait
            for rank in range(self.ranks):
                compute = busy[rank] if known else None
                block = Block(self.blocks, whole, compute, data(rank), queued(rank))
                self.detector.add(f"rank-{rank}", self.host(rank), 0, block)
            self.blocks += 1
            if found := self.detector.find():
                return found
        return None


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 8, 64, 1024])
def test_a_rank_that_is_a_tenth_slower_is_named_within_100_steps(ranks: int) -> None:
    for seed in range(50 if ranks < 64 else 3):
        found = Job(ranks, seed).run(100, lambda rank: 1.1 if rank == ranks - 1 else 1.0)
        assert found is not None
        assert found.processes == (f"rank-{ranks - 1}",)
        assert 0.06 < found.slower < 0.18
        assert not found.whole_host


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 64, pytest.param(1024, marks=pytest.mark.slow)])
def test_no_healthy_rank_is_named_in_10000_steps(ranks: int) -> None:
    assert Job(ranks, seed=ranks).run(10_000) is None


@pytest.mark.parametrize("ranks", [4, 16, 1024])
def test_a_slow_host_is_named(ranks: int) -> None:
    job = Job(ranks)
    found = job.run(100, lambda rank: 1.1 if job.host(rank) == "node1" else 1.0)
    assert found is not None
    assert found.hosts == ("node1",)
    assert found.whole_host
    assert str(found).startswith("the ranks of node1 are up to 1")


def test_a_rank_that_becomes_slow_late_and_recovers() -> None:
    job = Job(8)
    assert job.run(1000) is None
    found = job.run(100, lambda rank: 1.1 if rank == 3 else 1.0)
    assert found is not None
    how = f"{found.slower * 100:.0f} % slower than the others: cause unknown"
    assert str(found) == f"rank 3 on {job.host(3)} is {how}"
    for _ in range(10):
        recovered = job.run(STEPS)
    assert recovered is None


def test_one_fast_rank_makes_no_stragglers() -> None:
    assert Job(8).run(1000, lambda rank: 0.8 if rank == 0 else 1.0) is None


def test_the_likely_cause() -> None:
    late = Job(4).run(100, data=lambda rank: 0.3 if rank == 1 else 0.05)
    assert late is not None
    assert (late.processes, late.cause) == (("rank-1",), "data")
    shared = Job(4).run(
        100, lambda rank: 1.3 if rank == 2 else 1.0, queued=lambda rank: 0.25 * (rank == 2)
    )
    assert shared is not None
    assert shared.cause == "cpu"
    job = Job(4)
    job.run(100, lambda rank: 1.2 if rank == 2 else 1.0)
    throttled = job.detector.find(job.seen("clock", [2]))
    assert throttled is not None
    assert throttled.cause == "clock"
    assert str(throttled).endswith("the GPU's clock is throttled")


def sample(slowed: int, cpu: float) -> Sample:
    gpus = tuple(GpuSample(i, 99.0, *[None] * 7, slowed * (i == 1), None, None) for i in range(2))
    ranks = tuple(RankUse(f"rank-{rank}", 1.0, 0, 9) for rank in (9, 10))
    return Sample(1.0, 8, cpu, None, None, None, None, gpus, ranks)


def test_causes_in_the_telemetry() -> None:
    assert causes_seen(sample(0, 2.0), ()) == {"rank-9": set(), "rank-10": set()}
    assert causes_seen(sample(HEAT, 2.0), ()) == {"rank-9": set(), "rank-10": {"clock"}}
    assert causes_seen(sample(0, 7.9), ()) == {"rank-9": {"cpu"}, "rank-10": {"cpu"}}
    # Of two ranks on one GPU, nobody knows which one has it.
    shown = {"rank-9": set(), "rank-10": set(), "gpu-1": {"clock"}}
    assert causes_seen(sample(HEAT, 2.0), [1]) == shown


def test_a_cause_that_fewer_ranks_show_is_more_likely() -> None:
    busy = {("node0", "rank-0"): {"cpu"}, ("node0", "rank-1"): {"cpu", "clock"}}
    assert seen_cause("node0", "rank-1", busy) == "clock"
    hot = {("node0", "rank-0"): {"clock"}, ("node1", "rank-1"): {"cpu", "clock"}}
    assert seen_cause("node1", "rank-1", hot) == "cpu"
    assert seen_cause("node1", "rank-0", hot) == "unknown"


def test_a_foreign_process_on_the_gpu_and_lost_packets_are_causes() -> None:
    gpus = tuple(replace(one, others=int(one.index == 0)) for one in sample(0, 2.0).gpus)
    shared = replace(sample(0, 2.0), gpus=gpus)
    assert causes_seen(shared, ()) == {"rank-9": {"gpu"}, "rank-10": set()}
    lossy = replace(sample(0, 2.0), losses=50.0)
    assert causes_seen(lossy, ()) == {"rank-9": {"network"}, "rank-10": {"network"}}


def test_a_slow_network_is_named_if_steps_become_longer() -> None:
    job = Job(16)
    lossy = job.seen("network", range(8))
    job.run(500)
    assert job.detector.find(lossy) is None  # losses that cost nothing
    job.wait = 0.8
    job.run(100)
    assert job.detector.find() is None  # longer, but nobody knows why
    found = job.detector.find(lossy)
    assert found is not None
    assert (found.hosts, found.cause, found.measured) == (("node0",), "network", "network")
    assert str(found).startswith("steps take ")
    assert str(found).endswith(" % longer than before: node0 loses packets on the network")
    assert 0.3 < found.slower < 0.7
    assert job.detector.find(job.seen("network", range(16))) is None


def test_a_far_host_is_named_if_all_ranks_wait() -> None:
    trips = RoundTripTimes()
    for now in range(0, 100, 10):
        for host, trip in (("node0", 0.2), ("node1", 0.3), ("node2", 21.0)):
            trips.add(host, trip, now)
    assert trips.far(95.0) == {"node2"}
    trips.add("node2", 0.2, 95.1)
    assert trips.far(95.2) == {"node2"}  # compared once a second
    assert trips.far(96.1) == set()
    trips.add("node2", 21.0, 97.0)
    assert trips.far(200.0) == set()  # too old
    job = Job(24)
    far = job.seen("far", range(16, 24))
    job.run(100)
    assert job.detector.find(far) is None  # the round trips cost nothing
    job = Job(24)
    job.wait = 1.0
    job.run(100)
    found = job.detector.find(far)
    assert found is not None
    assert (found.hosts, found.cause, found.measured) == (("node2",), "far", "network")
    assert str(found).endswith("% longer: the network of node2 is slow")


def test_two_hosts_become_far_from_each_other() -> None:
    trips = RoundTripTimes()
    for now in range(0, 300, 10):
        for host in ("node0", "node1"):
            trips.add(host, 0.2 if now < 200 else 21.0, now)
        assert trips.far(now) == (set() if now < 200 else {"node0", "node1"})
    job = Job(4)
    far = job.seen("far", range(4))
    job.wait = 1.0
    job.run(200)
    assert job.detector.find(far) is None  # not longer than before
    job.wait = 2.0
    job.run(100)
    found = job.detector.find(far)
    assert found is not None
    assert found.hosts == ("node0", "node1")


def test_late_data_is_seen_even_if_the_computation_is_unknown() -> None:
    found = Job(4).run(100, data=lambda rank: 0.3 if rank == 1 else 0.01, known=False)
    assert found is not None
    assert (found.processes, found.cause) == (("rank-1",), "data")
    assert Job(4).run(1000, lambda rank: 1.5 if rank == 1 else 1.0, known=False) is None


def test_a_step_that_only_communicates_has_no_stragglers() -> None:
    detector = StragglerDetector(2)
    for number in range(50):
        for rank in range(2):
            block = Block(number, 1.0, 0.001 * (1 + rank), 0.0, 0.0)
            detector.add(f"rank-{rank}", "node0", 0, block)
    assert detector.find() is None


def test_only_ranks_that_do_the_same_work_are_compared() -> None:
    detector = StragglerDetector(4)
    for number in range(50):
        for rank in range(4):
            block = Block(number, 2.0, 1.0 + rank // 2, 0.0, 0.0)
            detector.add(f"rank-{rank}", "node0", rank // 2, block)
    assert detector.find() is None


def test_a_script_that_counts_from_one_again_is_compared_again() -> None:
    job = Job(4)
    assert job.run(1000) is None
    job.blocks = 0
    assert job.run(100, lambda rank: 1.2 if rank == 0 else 1.0) is not None


def test_ranks_that_report_nothing_do_not_stop_the_search() -> None:
    detector = StragglerDetector(4)
    for number in range(200):
        for rank in range(3):
            block = Block(number, 2.0, 1.2 if rank == 2 else 1.0, 0.0, 0.0)
            detector.add(f"rank-{rank}", "node0", 0, block)
    found = detector.find()
    assert found is not None
    assert found.processes == ("rank-2",)


def test_forged_reports_are_harmless() -> None:
    rng = random.Random(1)
    detector = StragglerDetector(4)
    for _ in range(20_000):
        block = Block(rng.randrange(1 << 53), rng.random(), rng.random(), 0.0, 1e6)
        detector.add(f"rank-{rng.randrange(10**6)}", "node0", rng.randrange(9), block)
        detector.find()
    assert len(detector._ranks) <= 4
    assert len(detector._waiting) <= 65
