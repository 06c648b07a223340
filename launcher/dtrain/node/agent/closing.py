"""The last work of a run, in threads beside the supervisor's loop. The loop goes on, because the
relay kills a supervisor that does not answer it."""

from __future__ import annotations

import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable

CLOSE_LIMIT = 12.0
"""Seconds after which the run ends without the rest: a program that hangs in the kernel ignores its
own limit. Longer than the limit of each piece of work."""


class Closing:
    """Pieces of work that run at the same time, each in a thread of its own."""

    def __init__(self, *pieces: Callable[[], object]) -> None:
        self._until = time.monotonic() + CLOSE_LIMIT
        self._threads: list[threading.Thread] = []
        for piece in pieces:
            thread = threading.Thread(target=piece, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # too many threads
                piece()
            else:
                self._threads.append(thread)

    def wait(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for the end. Returns whether it is over."""
        until = min(time.monotonic() + seconds, self._until)
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        busy = any(thread.is_alive() for thread in self._threads)
        return not busy or time.monotonic() >= self._until
