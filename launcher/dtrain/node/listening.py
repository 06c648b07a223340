"""Sockets that listen on this host."""

from __future__ import annotations

import errno
import socket
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Iterator

EXHAUSTED_PAUSE = 0.05
"""Seconds before another try to accept a connection while this process can open no more files."""
EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
"""Errors of a process or a machine that can open no more files for now."""


def on_all_addresses() -> Iterator[tuple[socket.socket, str]]:
    """A new TCP socket for each version of IP, and the address to bind it to: any of this host."""
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            sock = socket.socket(family, socket.SOCK_STREAM)
        except OSError:
            continue  # no IPv6 here
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        yield sock, address


def accept(listener: socket.socket) -> socket.socket | None:
    """The next connection. None after a pause if this process can open no more files: the client
    still waits. Raises OSError."""
    try:
        return listener.accept()[0]
    except OSError as error:
        if error.errno not in EXHAUSTED:
            raise
        time.sleep(EXHAUSTED_PAUSE)
        return None
