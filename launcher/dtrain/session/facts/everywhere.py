"""Does the same for all hosts at once, within a limit."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from dtrain.checks import HostFacts
from dtrain.diagnostics import ConnectError, NodeError
from dtrain.launchplan.plan import HostPlan
from dtrain.node.waiting import next_item
from dtrain.session.facts.conversation import ATTEMPTED
from dtrain.transport.questions import never

POLL = 0.2
"""Seconds between two looks at the limit and at Ctrl-C."""
MOST = 1.0
"""The most seconds that count between two looks. If there are more, this process did not run
(Ctrl-Z, a suspended machine), and has not read what arrived."""
WAITING = 30.0
"""Seconds after which the caller hears that answers are missing."""
_Item = TypeVar("_Item", HostPlan, HostFacts)
_Result = TypeVar("_Result")


def in_thread(call: Callable[[], None]) -> None:
    threading.Thread(target=call, daemon=True).start()


def everywhere(
    work: Callable[[_Item], _Result],
    items: Sequence[_Item],
    limit: float,
    run: Callable[[_Item, Callable[[], None]], None] = lambda item, call: in_thread(call),
    *,
    stopped: Callable[[], bool] = never,
    ending: float = 0.0,
    waiting: Callable[[], None] = lambda: None,
) -> list[_Result | NodeError]:
    """Run ``work`` for all hosts at once, in one thread per host. Returns the results in order.
    ``run`` starts a call for an item in its thread.

    A NodeError becomes that host's result. A call that has not ended becomes a timeout once each
    call has ended or has run for more than ``limit`` seconds. ``run`` must start each call, however
    late. Any other exception is raised here. Once the user has ``stopped`` it, raises
    KeyboardInterrupt, after ``ending`` seconds in which ``work`` may clean up. A signal handler
    that raises it could do so in a finalizer, where Python drops it.

    Calls ``waiting`` once if it takes more than WAITING seconds.
    """
    done: queue.SimpleQueue[tuple[int, _Result | BaseException]] = queue.SimpleQueue()
    begun: dict[int, float] = {}
    running = 0.0  # seconds in which this process ran

    def act(index: int, item: _Item) -> None:
        begun[index] = running
        try:
            done.put((index, work(item)))
        except BaseException as failure:  # noqa: BLE001 - raised in the waiting thread
            done.put((index, failure))

    looked = time.monotonic()
    for index, item in enumerate(items):
        run(item, partial(act, index, item))
    results: dict[int, _Result | NodeError] = {}
    deadline = math.inf
    while len(results) < len(items) and time.monotonic() < deadline:
        if stopped() and deadline == math.inf:
            deadline = time.monotonic() + ending
        before, looked = looked, time.monotonic()
        earlier, running = running, running + min(looked - before, MOST)
        if earlier <= WAITING < running:
            waiting()
        try:
            index, result = next_item(done, POLL)
        except queue.Empty:
            late = running - limit
            if all(at in results or begun.get(at, math.inf) < late for at in range(len(items))):
                break
            continue
        if isinstance(result, BaseException) and not isinstance(result, NodeError):
            if stopped():  # for example because Ctrl-C has ended a program that it has started
                break
            raise result
        results[index] = result
    if stopped():
        raise KeyboardInterrupt
    reason = f"no answer within {limit:.0f} s"
    hint = (
        "log in to the host: a login script may wait for input, its memory may be full, or a file"
        " system or driver may hang"
    )
    return [
        results[index]
        if index in results
        else ConnectError(item.host.name, ATTEMPTED, reason, hint=hint)
        for index, item in enumerate(items)
    ]
