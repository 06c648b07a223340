"""Shared threads on a machine that has no thread left for a moment."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest

from dtrain.transport import threads
from dtrain.transport.threads import Heartbeat, Threads
from support.limits import HANG
from support.threads import no_free_thread


def test_a_call_is_made_once_a_thread_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    few = Threads("few threads")
    first, second = threading.Event(), threading.Event()
    with no_free_thread(monkeypatch, "few threads"):
        few.run(first.set)
    few.run(second.set)
    assert first.wait(HANG)
    assert second.wait(HANG)


def test_a_heartbeat_starts_once_a_thread_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    few = Threads("few threads")
    heartbeat = Heartbeat(few, lambda: 0.01)
    beaten, called = threading.Event(), threading.Event()
    with no_free_thread(monkeypatch, "few threads"):
        heartbeat.start(beaten.set)
    few.run(called.set)
    assert beaten.wait(HANG)
    few.catch_up()  # as the calls of a heartbeat do
    assert called.wait(HANG)
    heartbeat.stop(beaten.set)


def test_a_heartbeat_makes_no_call_that_was_stopped() -> None:
    heartbeat = Heartbeat(Threads("beats"), lambda: 0.01)
    made, enough = [], threading.Event()

    def stopped() -> None:
        made.append("stopped")

    def beat() -> None:
        made.append("beat")
        heartbeat.stop(stopped)
        if made.count("beat") > 10:
            enough.set()

    heartbeat.start(stopped)
    heartbeat.start(beat)
    assert enough.wait(HANG)
    assert "stopped" not in made[made.index("beat") :]
    heartbeat.stop(beat)
    # All were stopped; another one begins again.
    again = threading.Event()
    heartbeat.start(again.set)
    assert again.wait(HANG)
    heartbeat.stop(again.set)


class OnRequest(Threads):
    """Keeps the call, for the test to make."""

    def run(self, call: Callable[[], None]) -> None:
        self.call = call


def test_calls_stay_spread_over_time_after_a_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(threads, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: now))
    thread = OnRequest("beats")
    heartbeat = Heartbeat(thread, lambda: 1.0)
    made: list[float] = []
    last: dict[int, float] = {}

    def call(number: int) -> None:
        assert now - last.get(number, -1.0) >= 0.5
        last[number] = now
        made.append(now)
        if number == 7 and 2 < now < 3:
            sleep(2.5)
        if now > 8:
            heartbeat.stop(calls[number])

    calls = [partial(call, number) for number in range(20)]
    for one in calls:
        heartbeat.start(one)
    thread.call()
    for period in (1, 6):
        tenths = Counter(int(time * 10) for time in made if period <= time < period + 1)
        assert tenths.total() == 20
        assert max(tenths.values()) <= 4
