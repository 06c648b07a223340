"""Messages to the user."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Notices:
    """Passes on each text once, from any thread."""

    def __init__(self, notice: Callable[[str], None]) -> None:
        self._notice = notice
        self._lock = threading.Lock()
        self._noticed: set[str] = set()

    def __call__(self, text: str) -> None:
        with self._lock:
            if text in self._noticed:
                return
            self._noticed.add(text)
        self._notice(text)
