"""Queries NCCL's RAS service: which ranks of a communicator have launched fewer operations.

From NCCL 2.24 on, the processes of a job listen on port 28028 of their host, unless
``NCCL_RAS_ADDR`` names another address. Any of them answers for the whole job, in lines of text,
and closes the connection.
"""

from __future__ import annotations

import socket
import time

from dtrain.node.agent.connections import connections, sockets_of
from dtrain.node.agent.wire import shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Collection

HOST, PORT = "127.0.0.1", 28028
COLLECT = 5
"""Seconds for which NCCL waits for the answers of the other processes. It may add some."""
LIMIT = 12.0
"""Seconds for the whole query."""
MAX_ANSWER = 64 << 10


def address_in(environment: dict[bytes, bytes]) -> tuple[str, int] | None:
    """Where the job's NCCL listens. None if the service is off, or the address is invalid."""
    if environment.get(b"NCCL_RAS_ENABLE", b"1").strip() == b"0":
        return None
    host, _, port = environment.get(b"NCCL_RAS_ADDR", b"").decode("latin-1").rpartition(":")
    if not host:
        return HOST, PORT
    valid = port.isdigit() and len(port) <= 5 and 0 < int(port) < 1 << 16
    host = host.strip("[]")
    return (HOST if host == "localhost" else host, int(port)) if valid else None


def query(address: tuple[str, int], pids: Collection[int]) -> str:
    """NCCL's status report. Empty if no process of ``pids``, or child of one, answers there in the
    protocol of the service."""
    deadline = time.monotonic() + LIMIT
    try:
        with socket.create_connection(address, timeout=1.0) as sock:
            sock.sendall(b"CLIENT PROTOCOL 2\nTIMEOUT %d\n" % COLLECT)
            greeting = receive(sock, deadline, 2)
            lines = greeting.split(b"\n")
            if not lines[0].startswith(b"SERVER PROTOCOL ") or lines[1:] != [b"OK", b""]:
                return ""
            # Another job on this host may listen there.
            if not belongs_to(sock, pids):
                return ""
            sock.sendall(b"VERBOSE STATUS\n")
            return shown(receive(sock, deadline))
    except (OSError, ValueError):  # ValueError: a name that is no name of a host
        return ""


def receive(sock: socket.socket, deadline: float, lines: int = 0) -> bytes:
    """Receive until ``deadline``, until the end of the stream, or until there are ``lines`` lines
    if given; at most `MAX_ANSWER` bytes. Raises OSError."""
    data = b""
    while len(data) < MAX_ANSWER and not (lines and data.count(b"\n") >= lines):
        left = deadline - time.monotonic()
        if left <= 0:
            break
        sock.settimeout(left)
        try:
            part = sock.recv(1 << 14)
        except socket.timeout:
            break
        if not part:
            break
        data += part
    return data[:MAX_ANSWER]


def belongs_to(sock: socket.socket, pids: Collection[int]) -> bool:
    """Whether the other end of a connection within this host is a process of ``pids``."""
    mine, theirs = sock.getsockname()[1], sock.getpeername()[1]
    inodes = {
        inode
        for local, remote, _, inode in connections()
        if (local[1], remote[1]) == (theirs, mine)
    }
    return any(inode in inodes for _, inode in sockets_of(pids))
