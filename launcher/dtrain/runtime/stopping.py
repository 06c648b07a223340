"""End a training on SIGTERM at a place of its own choosing: after a step, with a checkpoint.

A launch that is stopped sends TERM and waits ``job.grace`` before it kills; preemptible machines
do the same.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType

_requested = threading.Event()


def catch_sigterm() -> None:
    """From now on SIGTERM only sets what `stop_requested` tells. Call it from the main thread,
    after the framework is set up: TensorFlow puts a handler of its own in place."""
    signal.signal(signal.SIGTERM, _note)


def stop_requested() -> bool:
    """Whether this process has been asked to end. Ranks may learn of it at different steps: agree
    among them before you act on it."""
    return _requested.is_set()


def _note(_signum: int, _frame: FrameType | None) -> None:
    _requested.set()
