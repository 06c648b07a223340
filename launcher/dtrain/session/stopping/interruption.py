"""Ctrl-C in a program that calls dtrain and handles no signals for it."""

from __future__ import annotations

import _thread
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

from dtrain.node.waiting import next_item

POLL = 0.2
"""Seconds between two looks at signals: one that arrives just before a wait does not end it."""
_Result = TypeVar("_Result")


def uninterrupted(work: Callable[[], _Result], interrupt: Callable[[str], None]) -> _Result:
    """Run ``work``. What a signal handler raises, such as KeyboardInterrupt, is raised only when
    ``work`` has ended. Each time, ``interrupt`` is called with the reason, to end it early.

    Python runs signal handlers in the main thread, so there ``work`` has a thread of its own. If a
    handler raises before ``work`` has begun, it never begins.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    outcome: list[tuple[_Result | None, BaseException | None]] = []
    # Only wakes the main thread: a handler that raises as `get` returns drops what it returns.
    ended: queue.SimpleQueue[None] = queue.SimpleQueue()

    # Taken once: by the thread to begin, or here so that it never begins.
    begin = threading.Lock()

    def act() -> None:
        if not begin.acquire(blocking=False):
            return
        try:
            outcome.append((work(), None))
        except BaseException as failure:  # noqa: BLE001 - raised in the waiting thread
            outcome.append((None, failure))
        ended.put(None)

    # Not a daemon: where it cannot be waited for, the end of the process waits for it.
    thread = threading.Thread(target=act, name="dtrain-run")

    def start() -> None:
        try:
            thread.start()
        except RuntimeError as failure:  # the system allows no more threads
            outcome.append((None, failure))
            ended.put(None)

    raised: BaseException | None = None
    why = ""
    started = False
    while True:
        try:
            if not started:
                started = True
                # In a thread of its own: what a handler raises inside `Thread.start` may leave a
                # lock that the new thread needs.
                _thread.start_new_thread(start, ())
            if why and not outcome:
                interrupt(why)
                why = ""
            while not outcome:
                with contextlib.suppress(queue.Empty):
                    next_item(ended, POLL)
            break
        except BaseException as error:
            if begin.acquire(blocking=False):
                raise
            raised = raised or error
            why = "Ctrl-C" if isinstance(error, KeyboardInterrupt) else type(error).__name__
    ((result, failure),) = outcome
    if raised is not None:
        raise raised from failure
    if failure is not None:
        raise failure
    return result  # type: ignore[return-value]
