"""Detects whether workers of this host have ever been connected to other workers of the job.

Scans often at first and then rarely, until it finds a connection. The kernel's tables of TCP
connections take milliseconds to read on a large machine, so a scan reads them only if a worker has
a socket, and now and then for connections that are closed already. The rules avoid false alarms
for jobs whose workers do connect. These count:

*   a connection, open or just closed, at a port on which the job's processes listen;
*   an open connection of a worker to a process on this host that is not its own child;
*   an open connection of a worker to another machine, unless it is a web server of the internet.
"""

from __future__ import annotations

import os
import time

from dtrain.node.agent.folder import listed
from dtrain.node.agent.processes import descendants, read_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Collection, Iterator

FIRST, LONGEST = 0.1, 30.0
"""Seconds between two scans: at first, and at most."""
MAX_TABLE = 1 << 24
WEB = (80, 443)
OPEN = 0x01
CONNECTED = (OPEN, 0x04, 0x05, 0x06, 0x08, 0x09, 0x0B)
"""States of an open or closed connection: all except those of a connection attempt or listener."""


class Connections:
    def __init__(self, ports: Collection[int]) -> None:
        """``ports``: the ports on which processes of the job listen, on any host."""
        self._ports = frozenset(ports)
        self._pause = FIRST
        self._next = 0.0
        self._table_due = time.monotonic() + LONGEST
        self.found = False

    def watch(self, workers: Callable[[], Collection[int]]) -> float | None:
        """Scan if a scan is due. ``workers`` returns process ids. Returns the seconds until the
        next scan; None if no more scan is needed."""
        if self.found:
            return None
        now = time.monotonic()
        if now >= self._next:
            if now >= self._table_due or any(sockets_of(workers())):
                self.look(workers())
            self._next = now + self._pause
            self._pause = min(self._pause * 1.5, LONGEST)
        return None if self.found else self._next - now

    def look(self, workers: Collection[int]) -> None:
        if self.found:
            return
        self._table_due = time.monotonic() + LONGEST
        table = list(connections())
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
        owners: dict[tuple[bytes, int], set[int]] = {}
        for worker, inode in sockets_of(workers) if inodes else ():
            if inode in inodes:
                owners.setdefault(inodes[inode][0], set()).add(worker)
        for local, remote in inodes.values():
            mine, theirs = owners.get(local, set()), owners.get(remote, set())
            if mine and mine != theirs:
                self.found = True


def connections() -> Iterator[tuple[tuple[bytes, int], tuple[bytes, int], int, bytes]]:
    """The local end, remote end, state and inode of every TCP connection of this host."""
    for name in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in (read_file(name, MAX_TABLE) or b"").splitlines()[1:]:
            fields = line.split()
            if len(fields) > 9 and int(fields[3], 16) in CONNECTED:
                yield end_of(fields[1]), end_of(fields[2]), int(fields[3], 16), fields[9]


def end_of(text: bytes) -> tuple[bytes, int]:
    """Address and port of one end. An IPv4 address in an IPv6 socket is an IPv4 address."""
    address, _, port = text.partition(b":")
    packed = b"".join(
        bytes.fromhex(address[at : at + 8].decode())[::-1] for at in range(0, len(address), 8)
    )
    mapped = packed[:12] == b"\0" * 10 + b"\xff\xff"
    return packed[12:] if mapped else packed, int(port, 16)


def elsewhere(address: bytes, port: int) -> bool:
    """Whether the address may belong to another machine of the cluster."""
    import ipaddress  # 1 ms, which jobs on one host need not pay

    parsed = ipaddress.ip_address(address)
    return not parsed.is_loopback and not (parsed.is_global and port in WEB)


def sockets_of(workers: Collection[int]) -> Iterator[tuple[int, bytes]]:
    """Pairs of a worker and the inode of a socket of its processes."""
    for worker in workers:
        for pid in descendants(worker):
            folder = b"/proc/%d/fd" % pid
            for fd in listed(folder):
                try:
                    target = os.readlink(os.path.join(folder, fd))
                except OSError:
                    continue
                if target.startswith(b"socket:["):
                    yield worker, target[8:-1]
