"""Routines: hundreds of them share one thread, in which each waits for its own connection.

A routine is a generator. It yields what it waits for, and the ``yield`` returns the answer:

    Readable  whether there is something to read before the time is over
    Pause     whether the event was set before the time is over
    InThread  what a call returns or raises that may block: another thread makes it
"""

from __future__ import annotations

import contextlib
import math
import select
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from dtrain.records import dataclass
from dtrain.transport.threads import blocking, fulfil

TICK = 0.05
"""Seconds between two looks at the clock, the events and the calls."""


@dataclass(frozen=True, slots=True)
class Readable:
    socket: Any
    seconds: float


@dataclass(frozen=True, slots=True)
class Pause:
    seconds: float
    over: threading.Event | None = None


@dataclass(frozen=True, slots=True)
class InThread:
    work: Callable[[], Any]


_Result = TypeVar("_Result")
Routine = Generator[Readable | Pause | InThread, Any, _Result]


class Routines:
    def __init__(self, name: str) -> None:
        """``name``: of the thread."""
        self._selector = selectors.DefaultSelector()
        self._ready: deque[tuple[Routine[None], Callable[[], object]]] = deque()
        """Routines that go on, each with what returns or raises the answer."""
        self._waiting: dict[Routine[None], tuple[float, Readable | Pause]] = {}
        """Until when each of the others waits, except those with a `InThread`."""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self, routine: Routine[None]) -> None:
        """Run ``routine``, which must not raise. Any thread may call this, but one alone the first
        time."""
        self._ready.append((routine, _nothing))
        if self._thread.ident is None:
            self._thread.start()

    def stop(self) -> None:
        """Close the routines soon: each raises GeneratorExit where it waits."""
        self._stopped.set()

    def _run(self) -> None:
        checked = 0.0
        while not self._stopped.is_set():
            for key, _ in self._selector.select(0 if self._ready else TICK):
                self._end_wait(key.data, True)
            now = time.monotonic()
            if now > checked + TICK:
                checked = now
                for routine, (until, wait) in list(self._waiting.items()):
                    over = isinstance(wait, Pause) and wait.over is not None and wait.over.is_set()
                    if over or now >= until:
                        self._end_wait(routine, over)
            for _ in range(len(self._ready)):
                self._go_on(*self._ready.popleft())
        for routine in (*self._waiting, *(routine for routine, _ in self._ready)):
            routine.close()
        self._selector.close()

    def _end_wait(self, routine: Routine[None], answer: bool) -> None:
        _, wait = self._waiting.pop(routine)
        if isinstance(wait, Readable):
            self._selector.unregister(wait.socket)
        self._ready.append((routine, lambda: answer))

    def _go_on(self, routine: Routine[None], answer: Callable[[], object]) -> None:
        try:
            wait = _advance(routine, answer)
        except StopIteration:
            return
        if isinstance(wait, InThread):
            promise: Future[object] = Future()
            promise.add_done_callback(lambda done: self._ready.append((routine, done.result)))
            blocking.run(partial(fulfil, promise, wait.work))
        elif wait.seconds <= 0:
            self._ready.append((routine, _nothing))
        else:
            if isinstance(wait, Readable):
                try:
                    self._selector.register(wait.socket, selectors.EVENT_READ, routine)
                except (OSError, ValueError):  # it is closed: who reads finds out
                    self._ready.append((routine, lambda: True))
                    return
            self._waiting[routine] = time.monotonic() + wait.seconds, wait


def _nothing() -> None: ...


def _advance(routine: Routine[Any], answer: Callable[[], object]) -> Readable | Pause | InThread:
    """What the routine waits for next, after an answer. Raises StopIteration."""
    try:
        found = answer()
    except Exception as error:  # noqa: BLE001 (of a call: the routine handles it)
        return routine.throw(error)
    return routine.send(found)


def finish(routine: Routine[_Result], deadline: float = math.inf) -> _Result:
    """Run ``routine`` in this thread. Returns or raises what it does. Raises TimeoutError if it
    waits after ``deadline``, in seconds of the monotonic clock."""
    answer: object = None
    with contextlib.closing(routine):
        while True:
            try:
                wait = routine.send(answer)
                while isinstance(wait, InThread):
                    wait = _advance(routine, wait.work)
            except StopIteration as end:
                result: _Result = end.value
                return result
            seconds = min(wait.seconds, max(0.0, deadline - time.monotonic()))
            if isinstance(wait, Readable):
                poll = select.poll()
                poll.register(wait.socket, select.POLLIN)
                answer = bool(poll.poll(seconds * 1000))
            else:
                answer = (wait.over or threading.Event()).wait(seconds)
            if not answer and time.monotonic() >= deadline:
                raise TimeoutError
