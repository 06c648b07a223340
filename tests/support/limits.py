"""The limit on a test's waits. It ends a hang and does not measure speed: a busy machine
may be twenty times slower than an idle one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

HANG = 600.0
"""Seconds. Less than pytest's own limit, so that the test itself reports the wait."""
GONE = 60.0
"""Seconds for stopped processes to disappear. Less than a process of a test runs by
itself."""

_T = TypeVar("_T")


def until(condition: Callable[[], _T], what: str = "it") -> _T:
    """The first true value of a condition without an event, for changes in /proc or in files.
    Fails the test on a timeout."""
    deadline = time.monotonic() + HANG
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {HANG:g} s in vain for {what}"
        time.sleep(0.01)
    return value
