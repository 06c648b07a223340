"""The process that uses a TCP port of this host."""

from __future__ import annotations

import os

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
