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

    # Whether the work begins. The first entry counts, so that each thread may repeat its own.
    begins: list[bool] = []

    def act() -> None:
        begins.append(True)
        if not begins[0]:
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
    latest: BaseException | None = None
    started = False
    while True:
        try:
            if latest is not None:
                begins.append(False)
                if not begins[0]:
                    break
                if not outcome:
                    pressed = isinstance(latest, KeyboardInterrupt)
                    interrupt("Ctrl-C" if pressed else type(latest).__name__)
                latest = None
            if not started:
                started = True
                # In a thread of its own: what a handler raises inside `Thread.start` may leave a
                # lock that the new thread needs.
                _thread.start_new_thread(start, ())
            while not outcome:
                with contextlib.suppress(queue.Empty):
                    next_item(ended, POLL)
            break
        except BaseException as error:  # noqa: BLE001 - raised below
            # Without a call: a handler that raised in one would leave the work on its own.
            raised, latest = error if raised is None else raised, error
    result, failure = outcome[0] if outcome else (None, None)
    if raised is not None:
        raise raised from failure
    if failure is not None:
        raise failure
    return result  # type: ignore[return-value]
