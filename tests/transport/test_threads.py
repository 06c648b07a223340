"""Shared threads on a machine that has no thread left for a moment."""

from __future__ import annotations

import threading

import pytest

from dtrain.transport.threads import Heartbeat, Threads
from support.limits import HANG
from support.threads import no_free_thread


def test_a_call_is_made_once_a_thread_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = Threads("few threads")
    first, second = threading.Event(), threading.Event()
    with no_free_thread(monkeypatch, "few threads"):
        threads.run(first.set)
    threads.run(second.set)
    assert first.wait(HANG)
    assert second.wait(HANG)


def test_a_heartbeat_starts_once_a_thread_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = Threads("few threads")
    heartbeat = Heartbeat(threads, lambda: 0.01)
    beaten, called = threading.Event(), threading.Event()
    with no_free_thread(monkeypatch, "few threads"):
        heartbeat.start(beaten.set)
    threads.run(called.set)
    assert beaten.wait(HANG)
    threads.catch_up()  # as the calls of a heartbeat do
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

    heartbeat.start(beat)
    heartbeat.start(stopped)
    assert enough.wait(HANG)
    assert "stopped" not in made[made.index("beat") :]
    heartbeat.stop(beat)
    # All were stopped; another one begins again.
    again = threading.Event()
    heartbeat.start(again.set)
    assert again.wait(HANG)
    heartbeat.stop(again.set)
