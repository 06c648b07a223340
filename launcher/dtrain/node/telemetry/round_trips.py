"""How long other hosts take to answer the ranks, from the kernel's state of their TCP connections.

The kernel measures the round trip of each connection (`tcp_info` in linux/tcp.h, read through
sock_diag(7)). This needs no privileges and sends no packet. Only connections that send much count:
a receiver confirms a small message with its next answer, which may follow a step of computation.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import struct
import time

from dtrain.node.sockets import attributes, connections_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Collection, Iterator

PAUSE = 5.0
"""Seconds between two looks at the connections."""
RECENT = 5000
"""Milliseconds: older round trips do not count."""
MAX_CONNECTIONS = 10_000

_INFO, _ESTABLISHED = 2, 1 << 1
_MESSAGE = struct.Struct("=4x4x16s16s12x16xI")
_SEGMENT, _SENT, _RTT, _ACKED, _SEGMENTS, _LEAST = 16, 44, 68, 120, 156, 160
"""Offsets in `tcp_info`: the size of a segment, milliseconds since data was sent, the round trip in
microseconds, confirmed bytes, and segments with data that were sent. The last value is the least
size of `tcp_info`."""
BULK = 0.5
"""Part of a segment that a connection fills on average, if it sends much."""


class RoundTrips:
    def __init__(self) -> None:
        self._until = 0.0
        self._last: float | None = None

    def read(self, inodes: Collection[int]) -> float | None:
        """Milliseconds of the fastest connection with another host, of the sockets ``inodes``. The
        fastest, because the others may lead to slow hosts. None without any that sends."""
        now = time.monotonic()
        if now >= self._until:
            self._until = now + PAUSE
            trips: list[int] = []
            if inodes:
                with contextlib.suppress(OSError, struct.error):
                    for family in (socket.AF_INET, socket.AF_INET6):
                        trips += [trip for inode, trip in connections(family) if inode in inodes]
            self._last = round(min(trips) / 1000, 3) if trips else None
        return self._last


def connections(family: int) -> Iterator[tuple[int, int]]:
    """Inode and round trip of each connection that has sent much to another host, and recently.
    Raises OSError and struct.error."""
    messages = connections_of(family, _ESTABLISHED, _INFO)
    return filter(None, map(connection, itertools.islice(messages, MAX_CONNECTIONS)))


def connection(message: bytes) -> tuple[int, int] | None:
    source, target, inode = _MESSAGE.unpack_from(message)
    if source == target:
        return None
    for kind, info in attributes(message, _MESSAGE.size):
        if kind == _INFO and len(info) >= _LEAST:
            size, sent, trip, segments = (
                struct.unpack_from("=I", info, offset)[0]
                for offset in (_SEGMENT, _SENT, _RTT, _SEGMENTS)
            )
            (acked,) = struct.unpack_from("=Q", info, _ACKED)
            bulk = acked > BULK * size * segments
            return (inode, trip) if sent <= RECENT and trip and bulk else None
    return None
