"""Ctrl-C in a program that calls dtrain and handles no signals for it."""

from __future__ import annotations

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

    Python runs signal handlers in the main thread, so there ``work`` has a thread of its own.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    outcome: list[tuple[_Result | None, BaseException | None]] = []
    # Only wakes the main thread: a handler that raises as `get` returns drops what it returns.
    ended: queue.SimpleQueue[None] = queue.SimpleQueue()

    def act() -> None:
        try:
            outcome.append((work(), None))
        except BaseException as failure:  # noqa: BLE001 - raised in the waiting thread
            outcome.append((None, failure))
        ended.put(None)

    raised: BaseException | None = None
    why = ""
    # Not a daemon: where it cannot be waited for, the end of the process waits for it.
    threading.Thread(target=act, name="dtrain-run").start()
    while True:
        try:
            if why and not outcome:
                interrupt(why)
                why = ""
            while not outcome:
                with contextlib.suppress(queue.Empty):
                    next_item(ended, POLL)
            break
        except BaseException as error:  # noqa: BLE001 - raised below
            raised = raised or error
            why = "Ctrl-C" if isinstance(error, KeyboardInterrupt) else type(error).__name__
    ((result, failure),) = outcome
    if raised is not None:
        raise raised from failure
    if failure is not None:
        raise failure
    return result  # type: ignore[return-value]
