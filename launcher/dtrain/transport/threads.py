"""Threads that all hosts share: a thread for each host costs memory and time."""

from __future__ import annotations

import heapq
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Future

IDLE_SECONDS = 10.0
"""Seconds after which an idle thread ends."""
_GOLDEN_RATIO = 0.618034
"""The fractional parts of its multiples are spread evenly, however many there are."""


_Result = TypeVar("_Result")


def fulfil(promise: Future[_Result], work: Callable[[], _Result]) -> None:
    """Make ``promise`` return or raise what ``work`` does, unless it is cancelled already."""
    if promise.set_running_or_notify_cancel():
        try:
            promise.set_result(work())
        except BaseException as error:  # noqa: BLE001 - `result` raises it
            promise.set_exception(error)


class Threads:
    """Runs calls that may block, in as few threads as possible: a call waits only for threads that
    are free soon, never for one that blocks."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._calls: deque[Callable[[], None]] = deque()
        self._idle = 0

    def run(self, call: Callable[[], None]) -> None:
        """Run ``call`` soon. It must not raise."""
        with self._changed:
            self._calls.append(call)
        self.catch_up()

    def catch_up(self) -> None:
        """Start a thread if calls wait for one."""
        with self._changed:
            if self._idle >= len(self._calls):
                self._changed.notify()
                return
        # A machine without a free thread: the next thread that starts or is free makes the call.
        with suppress(RuntimeError):
            threading.Thread(target=self._work, name=self._name, daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                self._changed.wait_for(lambda: self._calls, IDLE_SECONDS)
                self._idle -= 1
                if not self._calls:
                    return
                call = self._calls.popleft()
            call()


blocking = Threads("dtrain-blocking")
"""For everything that may wait for one host."""


class Heartbeat:
    """Makes many calls every few seconds, all in a single one of the ``threads``. They are spread
    over time: if each keeps a thread busy for a moment, few threads serve all. ``seconds`` returns
    more than 0."""

    def __init__(self, threads: Threads, seconds: Callable[[], float]) -> None:
        self._threads = threads
        self._seconds = seconds
        self._lock = threading.Lock()
        self._calls: dict[Callable[[], None], int] = {}
        """Each call that was started and not stopped, with its number."""
        self._started = 0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        """A heap of when each call is due, also of calls that were stopped."""
        self._running = False

    def start(self, call: Callable[[], None]) -> None:
        """Make ``call`` from now on. It must not block."""
        with self._lock:
            self._started += 1
            self._calls[call] = self._started
            share = self._started * _GOLDEN_RATIO % 1
            due = time.monotonic() + self._seconds() * share
            heapq.heappush(self._due, (due, self._started, call))
            if not self._running:
                self._running = True
                self._threads.run(self._beat)

    def stop(self, call: Callable[[], None]) -> None:
        with self._lock:
            self._calls.pop(call, None)

    def _beat(self) -> None:
        while True:
            with self._lock:
                if not self._calls:
                    self._due.clear()
                    self._running = False
                    return
                first = self._due[0][0]
            time.sleep(max(0.0, first - time.monotonic()))
            with self._lock:
                due, number, call = heapq.heappop(self._due)
                if self._calls.get(call) != number:  # it was stopped
                    continue
                seconds = self._seconds()
                late = max(0.0, time.monotonic() - due)
                # Whole periods later, so that calls which were late together do not stay together.
                again = due + seconds * (1 + round(late / seconds))
                heapq.heappush(self._due, (again, number, call))
            call()
