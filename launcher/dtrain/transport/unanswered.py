"""Names the hosts that take long to answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dtrain import hostlist
from dtrain.transport.endpoint import Endpoint

NOTICE_SECONDS = 3.0
"""Seconds without an answer after which a notice names a host."""
TOGETHER = 0.5
"""A host that has waited at most these seconds less is in the same notice."""


class Unanswered:
    """The connections that wait for the other side, without the user. Thread-safe.

    Names each host once, and several in one notice.
    """

    def __init__(self, notice: Callable[[str], None]) -> None:
        self._notice = notice
        self._lock = threading.Lock()
        self._waiting: dict[object, tuple[Endpoint, float]] = {}
        """Each with the time since when."""
        self._named: set[Endpoint] = set()
        self._timer: threading.Timer | None = None

    @contextmanager
    def watching(self, endpoint: Endpoint) -> Iterator[None]:
        entry = object()
        with self._lock:
            self._waiting[entry] = endpoint, time.monotonic()
            self._set_timer()
        try:
            yield
        finally:
            with self._lock:
                del self._waiting[entry]
                if self._timer is not None and not self._waiting:
                    self._timer.cancel()
                    self._timer = None

    def _set_timer(self) -> None:
        if self._timer is not None:
            return
        since = [since for endpoint, since in self._waiting.values() if endpoint not in self._named]
        if since:
            pause = min(since) + NOTICE_SECONDS - time.monotonic()
            self._timer = threading.Timer(pause, self._name)
            self._timer.daemon = True
            self._timer.start()

    def _name(self) -> None:
        with self._lock:
            before = time.monotonic() - NOTICE_SECONDS + TOGETHER
            late = {each: None for each, since in self._waiting.values() if since < before}
            late = {each: None for each in late if each not in self._named}
            self._named.update(late)
            self._timer = None
            self._set_timer()
        if late:
            self._notice(f"waiting for {_text([*late])} to answer")


def _text(late: list[Endpoint]) -> str:
    if len(late) > 1:
        return hostlist.brief(hostlist.in_order(endpoint.host for endpoint in late))
    kind = "the jump host " if late[0].is_jump else ""
    return f"{kind}{late[0].host} ({late[0].place})"
