"""TCP ports of this host, and the processes that use them."""

from __future__ import annotations

import errno
import os
import socket

from dtrain.node.files import text_of, user_name
from dtrain.node.sockets import inodes_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import AbstractSet

UNKNOWN_HOLDER = "an unknown process that is not listening, such as another launch"
"""For messages if `port_holder` finds none."""
MAX_TABLE = 1 << 24
"""Bytes read of a table of TCP sockets."""


def tcp_entries(port: int) -> list[list[str]]:
    """The fields of the kernel's lines about TCP sockets on the local ``port``. Linux does not list
    a socket that is bound, but neither listening nor connected."""
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in (text_of(table, MAX_TABLE) or "").splitlines()[1:]:
            fields = line.split()
            if len(fields) > 9 and int(fields[1].rpartition(":")[2], 16) == port:
                found.append(fields)
    return found


def bind_alone(sock: socket.socket, address: str, port: int) -> None:
    """Bind a port that no other process has bound, even if that does not listen yet. Raises
    OSError."""
    try:
        sock.bind((address, port))
    except OSError as error:
        if error.errno != errno.EADDRINUSE or not tcp_entries(port):
            raise
        # Ignore closed connections (TIME_WAIT) of an earlier job, and only those.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address, port))


def port_holder(port: int) -> str:
    """The process that uses ``port``, and its user if that is another user. Empty if the kernel
    lists none."""
    users = {int(fields[9]): int(fields[7]) for fields in tcp_entries(port) if fields[9] != "0"}
    for uid in users.values():
        owner = "" if uid == os.geteuid() else " of user %s" % user_name(uid)
        return (_process_with(users.keys()) or "a process") + owner
    return ""


def _process_with(sockets: AbstractSet[int]) -> str:
    """The first process that has one of ``sockets`` open; empty if this user can see none."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if not sockets.isdisjoint(inodes_of(int(pid))):
            command = (text_of("/proc/%s/cmdline" % pid, 1 << 12) or "").replace("\0", " ").strip()
            return "process %s (%s)" % (pid, command[:120])
    return ""
