"""Signals that stop a launch."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

from dtrain.session.stopping.signals import on_signals
from support.limits import HANG


def test_a_signal_may_interrupt_the_holder_of_any_lock() -> None:
    lock, acted = threading.Lock(), threading.Event()

    def act(number: int) -> None:
        if lock.acquire(timeout=HANG):
            lock.release()
            acted.set()

    with on_signals(act):
        with lock:
            signal.raise_signal(signal.SIGINT)
            assert not acted.is_set()
        assert acted.wait(HANG)


def test_signals_are_handled_in_order_and_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    arrived: list[int] = []
    both = threading.Event()

    def act(number: int) -> None:
        arrived.append(number)
        if len(arrived) == 2:
            both.set()

    with on_signals(act):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert both.wait(HANG)
    assert arrived == [signal.SIGTERM, signal.SIGINT]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_stop_that_comes_too_late_does_not_kill_the_program() -> None:
    program = """
import signal
from dtrain.session.stopping.signals import INSIST, STOP, on_signals

with on_signals(print):
    pass
for number in (STOP, INSIST):
    signal.raise_signal(number)
print("goes on")
"""
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "goes on\n"
