"""Settings of this process for launches on many hosts."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

SWITCH_SECONDS = 0.0002
"""For each host, how long Python's threads wait for their turn."""
LEAST_SWITCH = 0.0005


class _SwitchInterval:
    """Python's switch interval, for the hosts of all launches that run now.

    Each thread that waits for its turn wakes after this interval, usually 5 ms, to ask for it. With
    a thousand threads, that takes more time than their work. So they wait longer. With a few hosts,
    they wait less: while one thread shows output, the thread that receives it needs a new turn
    after each read and each write of a file.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hosts = 0
        self._usual = sys.getswitchinterval()

    def add(self, hosts: int) -> None:
        """``hosts``: negative when they are done."""
        with self._lock:
            if not self._hosts:
                self._usual = sys.getswitchinterval()
            self._hosts += hosts
            wanted = max(LEAST_SWITCH, self._hosts * SWITCH_SECONDS)
            sys.setswitchinterval(wanted if self._hosts else self._usual)


_switch_interval = _SwitchInterval()


@contextlib.contextmanager
def prepared_for(hosts: int) -> Iterator[None]:
    """Allow a thread for each of ``hosts``."""
    _switch_interval.add(hosts)
    try:
        yield
    finally:
        _switch_interval.add(-hosts)
