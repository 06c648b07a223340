"""Ports for servers that tests start."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket

FIRST, LAST = 11_000, 28_000
"""Below the range from which the system gives ports to connections, so that none takes a port
before a test's server does."""


def free_ports(count: int, address: str = "127.0.0.1") -> list[int]:
    """Ports that nothing uses. No other process of this test run chooses them too."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    chosen: list[int] = []
    while len(chosen) < count:
        port = FIRST + secrets.randbelow((LAST - FIRST) // workers) * workers + worker
        if port not in chosen and is_free(address, port):
            chosen.append(port)
    return chosen


def free_port(address: str = "127.0.0.1") -> int:
    return free_ports(1, address)[0]


def free_pair(address: str = "127.0.0.1") -> tuple[int, int]:
    """Two ports, one after the other."""
    while not is_free(address, (first := free_port(address)) + 1):
        pass
    return first, first + 1


def is_free(address: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        try:
            probe.bind((address, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return False
        return True


def loopbacks() -> list[str]:
    """This machine's own addresses: it may have no IPv6."""
    found = []
    for address in ("127.0.0.1", "::1"):
        with contextlib.suppress(OSError):
            is_free(address, 0)
            found.append(address)
    return found
