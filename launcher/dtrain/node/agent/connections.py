"""Detects whether workers of this host have ever been connected to other workers of the job.

Scans often at first and then rarely, until it finds a connection. It asks the kernel for its TCP
connections only if a worker has a socket, and now and then for connections that are closed already.
The rules avoid false alarms for jobs whose workers do connect. These count:

*   a connection, open or just closed, at a port on which the job's processes listen;
*   an open connection of a worker to a process on this host that is not its own child;
*   an open connection of a worker to another machine, unless it is a web server of the internet.
"""

from __future__ import annotations

import socket
import struct
import time

from dtrain.node.agent.processes import descendants
from dtrain.node.sockets import connections_of, inodes_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Collection, Iterator

    End = tuple[bytes, int]
    """The address and port of one end of a connection."""
    Connection = tuple[End, End, int, int]
    """Its local end, its remote end, its state and its inode."""

FIRST, LONGEST = 0.1, 30.0
"""Seconds between two scans: at first, and at most."""
WEB = (80, 443)
LOOPBACK6 = bytes(15) + b"\1"
OPEN = 0x01
CONNECTED = (OPEN, 0x04, 0x05, 0x06, 0x08, 0x09, 0x0B)
"""States of an open or closed connection: all except those of a connection attempt or listener."""
MESSAGE = struct.Struct("=BB2x4s16s16s12x16xI")
"""struct inet_diag_msg"""


class Connections:
    def __init__(self, ports: Collection[int]) -> None:
        """``ports``: the ports on which processes of the job listen, on any host."""
        self._ports = frozenset(ports)
        self._pause = FIRST
        self._next = 0.0
        self._table_due = time.monotonic() + LONGEST
        self.found: bool | None = False
        """None if the kernel does not tell."""

    def watch(self, workers: Callable[[], Collection[int]]) -> float | None:
        """Scan if a scan is due. ``workers`` returns process ids. Returns the seconds until the
        next scan; None if no more scan is needed."""
        if self.found is not False:
            return None
        now = time.monotonic()
        if now >= self._next:
            if now >= self._table_due or any(sockets_of(workers())):
                self.look(workers())
            self._next = now + self._pause
            self._pause = min(self._pause * 1.1, LONGEST)
        return self._next - now if self.found is False else None

    def look(self, workers: Collection[int]) -> None:
        if self.found is not False:
            return
        self._table_due = time.monotonic() + LONGEST
        try:
            table = list(connections())
        except OSError:
            self.found = None
            return
        if any({local[1], remote[1]} & self._ports for local, remote, _, _ in table):
            self.found = True
            return
        here = {local for local, _, state, _ in table if state == OPEN}
        # Reading the processes' descriptors is slow, so only relevant connections get that far.
        inodes = {
            inode: (local, remote)
            for local, remote, state, inode in table
            if state == OPEN and (remote in here or elsewhere(*remote))
        }
        owners: dict[End, set[int]] = {}
        for worker, inode in sockets_of(workers) if inodes else ():
            if inode in inodes:
                owners.setdefault(inodes[inode][0], set()).add(worker)
        for local, remote in inodes.values():
            mine, theirs = owners.get(local, set()), owners.get(remote, set())
            if mine and mine != theirs:
                self.found = True


def connections() -> Iterator[Connection]:
    """Every TCP connection of this host. Raises OSError as `connections_of` does."""
    states = sum(1 << state for state in CONNECTED)
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            for message in connections_of(family, states):
                _, state, ports, local, remote, inode = MESSAGE.unpack_from(message)
                here, there = struct.unpack(">HH", ports)
                yield end_of(family, local, here), end_of(family, remote, there), state, inode
        except OSError:
            if family == socket.AF_INET:  # it may have no IPv6
                raise


def end_of(family: int, address: bytes, port: int) -> End:
    """One end. An IPv4 address in an IPv6 socket is an IPv4 address."""
    packed = address[: 4 if family == socket.AF_INET else 16]
    mapped = packed[:12] == b"\0" * 10 + b"\xff\xff"
    return packed[12:] if mapped else packed, port


def elsewhere(address: bytes, port: int) -> bool:
    """Whether the address may belong to another machine of the cluster."""
    if address[0] == 127 if len(address) == 4 else address == LOOPBACK6:
        return False
    if port not in WEB:
        return True
    import ipaddress  # takes longer than all else here

    return not ipaddress.ip_address(address).is_global


def sockets_of(workers: Collection[int]) -> Iterator[tuple[int, int]]:
    """Pairs of a worker and the inode of a socket of its processes."""
    for worker in workers:
        for pid in descendants(worker):
            for inode in inodes_of(pid):
                yield worker, inode
