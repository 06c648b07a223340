"""Signals that stop a launch cleanly."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue

from dtrain.session.stopping.control import Control

STOP = signal.SIGUSR2
"""The request of `dtrain stop`."""
INSIST = signal.SIGUSR1
"""Requests an immediate kill. Unlike SIGINT, shells do not make background jobs ignore it."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, STOP, INSIST)
_handled = 0


@contextmanager
def on_signals(act: Callable[[int], None]) -> Iterator[None]:
    """Call ``act`` for Ctrl-C, SIGTERM, a closed terminal, `STOP` and `INSIST`. Main thread only.

    ``act`` runs in a thread of its own: a signal handler may interrupt the holder of any lock.
    Later, `STOP` and `INSIST` do nothing unless the program had a handler: `dtrain stop` may send
    one to a launch that ends at this moment, and by default it would kill this process.
    """
    global _handled
    arrived: SimpleQueue[int | None] = SimpleQueue()

    def pass_on() -> None:
        for number in iter(arrived.get, None):
            act(number)

    threading.Thread(target=pass_on, name="dtrain-signals", daemon=True).start()
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    for number in _SIGNALS:
        # Under nohup, SIGHUP stays ignored.
        if before[number] is not signal.SIG_IGN:
            signal.signal(number, lambda number, _frame: arrived.put(number))
    _handled += 1
    try:
        yield
    finally:
        _handled -= 1
        for number, handler in before.items():
            late = number in (STOP, INSIST) and handler is signal.SIG_DFL
            signal.signal(number, _ignore if late else handler)
        arrived.put(None)


def _ignore(_number: int, _frame: object) -> None:
    """Unlike SIG_IGN, programs that this process starts do not inherit it."""


def are_handled() -> bool:
    """Whether a signal to this process stops its launches cleanly."""
    return _handled > 0


def stop_by_signal(control: Control, number: int) -> None:
    """Request the stop that a signal means."""
    if number == signal.SIGHUP:
        control.hang_up("its terminal was closed")
    elif number in (signal.SIGTERM, STOP):
        # Two programs that each request a stop do not mean a kill.
        control.stop("dtrain stop" if number == STOP else "SIGTERM", once=True)
    elif number == INSIST:
        control.kill("dtrain stop --force")
    else:
        control.stop("Ctrl-C")
