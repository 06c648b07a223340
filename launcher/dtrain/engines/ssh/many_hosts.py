"""Settings of this process for a launch on many hosts."""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Iterator

SWITCH_SECONDS = 0.0002
"""For each host, how long Python's threads wait for their turn."""
LEAST_SWITCH = 0.0005
FILES = 4
"""Open files for each host: its connection, and others for a moment."""
OWN_FILES = 256


@contextlib.contextmanager
def prepared_for(hosts: int) -> Iterator[None]:
    """Allow a thread and an open connection for each of ``hosts``.

    Each thread that waits for its turn wakes after Python's switch interval, 5 ms, to ask for it.
    With a thousand threads, that takes more time than their work. So they wait longer. With a few
    hosts, they wait less: while one thread shows output, the thread that receives it needs a new
    turn after each read and each write of a file.
    """
    _allow_files(hosts * FILES + OWN_FILES)
    before = sys.getswitchinterval()
    sys.setswitchinterval(max(LEAST_SWITCH, hosts * SWITCH_SECONDS))
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def _allow_files(wanted: int) -> None:
    """Raise the soft limit of open files, which is 1,024 on most systems."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
