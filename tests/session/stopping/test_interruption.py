"""What a signal handler raises while the main thread waits for work."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from dtrain.session.stopping import interruption
from dtrain.session.stopping.interruption import uninterrupted
from support.limits import HANG


def test_ctrl_c_before_the_work_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    began = threading.Event()
    starts: list[Callable[[], None]] = []

    def interrupted(start: Callable[[], None], _arguments: object) -> None:
        starts.append(start)
        raise KeyboardInterrupt

    monkeypatch.setattr(interruption, "_thread", SimpleNamespace(start_new_thread=interrupted))
    with pytest.raises(KeyboardInterrupt):
        uninterrupted(began.set, lambda why: None)
    starts[0]()
    for thread in threading.enumerate():
        if thread.name == "dtrain-run":
            thread.join(HANG)
    assert not began.is_set()


def test_ctrl_c_at_the_end_of_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The handler may raise after the wait has ended and before its result is stored."""

    go = threading.Event()

    def interrupted(items: queue.SimpleQueue[None], seconds: float) -> None:
        go.set()
        items.get(timeout=HANG)
        raise KeyboardInterrupt

    monkeypatch.setattr(interruption, "next_item", interrupted)
    with pytest.raises(KeyboardInterrupt):
        uninterrupted(lambda: go.wait(HANG), lambda why: None)


def test_ctrl_c_during_the_request_to_end_is_a_second_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    began, go = threading.Event(), threading.Event()
    reasons: list[str] = []

    def work() -> None:
        began.set()
        go.wait(HANG)

    def interrupt(why: str) -> None:
        reasons.append(why)
        if len(reasons) == 1:
            raise KeyboardInterrupt
        go.set()

    def pressed(items: queue.SimpleQueue[None], seconds: float) -> None:
        if not reasons:
            began.wait(HANG)
            raise KeyboardInterrupt
        items.get(timeout=HANG)

    monkeypatch.setattr(interruption, "next_item", pressed)
    with pytest.raises(KeyboardInterrupt):
        uninterrupted(work, interrupt)
    assert reasons == ["Ctrl-C", "Ctrl-C"]


def test_work_in_another_thread_stays_there() -> None:
    with ThreadPoolExecutor(1) as pool:
        worker = pool.submit(threading.current_thread).result()
        work = pool.submit(uninterrupted, threading.current_thread, lambda why: None)
        assert work.result() is worker
