"""Slow ranks, by what their GPUs do."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dtrain.failures.activity import GpuActivity
from dtrain.failures.stragglers import less_active
from dtrain.messages.telemetry import HEAT, GpuSample


def gpu(index: int, use: float, clock: float = 1980.0, slowed: int = 0) -> GpuSample:
    return GpuSample(index, use, None, None, 600.0, 700.0, 60.0, clock, 1980.0, slowed, 0, 0)


def after(
    seconds: int, sample: Callable[[int, int], GpuSample], watched: GpuActivity | None = None
) -> Sequence[tuple[str, str, float]]:
    """What is slow after so many seconds of 8 GPUs on one host; ``sample`` gets GPU and second."""
    watched = watched or GpuActivity()
    for now in range(seconds + 1):
        gpus = [(f"rank-{index}", sample(index, now)) for index in range(8)]
        watched.add("node0", gpus, float(now))
    return watched.slow(float(seconds))


def test_the_gpu_that_works_less_is_named() -> None:
    assert after(30, lambda index, now: gpu(index, 0 if index == 5 else 98)) == []
    slow = after(150, lambda index, now: gpu(index, 60 if index == 5 else 98))
    assert [process for process, _, _ in slow] == ["rank-5"]
    found = less_active(slow, {("node0", "rank-5"): {"cpu"}})
    assert str(found) == (
        "rank 5 on node0 is 39 % less active on the GPU than the others:"
        " other processes use the CPU"
    )


def test_a_throttled_gpu_is_as_busy_as_the_others() -> None:
    slow = after(60, lambda index, now: gpu(index, 98, *((1500, HEAT) if index == 2 else ())))
    assert slow == [("rank-2", "node0", 0.242)]


def test_healthy_gpus_pauses_and_idle_jobs_are_no_news() -> None:
    assert after(600, lambda index, now: gpu(index, 90 + index + now % 3)) == []
    assert after(600, lambda index, now: gpu(index, 0 if index else 40)) == []
    # Rank 0 saves a checkpoint for 30 s at the end.
    assert after(600, lambda index, now: gpu(index, 0 if now > 570 and not index else 98)) == []
    # Half of the GPUs cannot all be slower than usual.
    assert after(600, lambda index, now: gpu(index, 98 if index < 3 else 20)) == []
    assert less_active([], {}) is None


def test_a_host_without_new_samples_is_not_judged() -> None:
    watched = GpuActivity()
    after(150, lambda index, now: gpu(index, 20 if index == 5 else 98), watched)
    assert watched.slow(500.0) == []
