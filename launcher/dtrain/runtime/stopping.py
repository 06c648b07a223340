"""End training cleanly on SIGTERM: after a step, with a checkpoint.

A launch that is stopped sends TERM and waits ``job.grace`` seconds before it kills. Preemptible
machines do the same.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType

_requested = threading.Event()


def catch_sigterm() -> None:
    """From now on SIGTERM only sets the result of `stop_requested`. Call it from the main thread,
    after the framework is set up: TensorFlow installs its own handler."""
    signal.signal(signal.SIGTERM, _note)


def stop_requested() -> bool:
    """Whether this process has received SIGTERM. Ranks may see it at different steps, so they must
    agree before they act on it."""
    return _requested.is_set()


def _note(_signum: int, _frame: FrameType | None) -> None:
    _requested.set()
