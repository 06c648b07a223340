"""The process that uses a TCP port of this host.

Shipped to nodes: Python 3.8, standard library only.
"""

from __future__ import annotations

import contextlib
import os
import pwd

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Collection

UNKNOWN_HOLDER = "an unknown process that is not listening, such as another launch"
"""For messages if `port_holder` finds none."""
MAX_TABLE = 1 << 24
"""Bytes read of a table of TCP sockets."""


def tcp_entries(port: int) -> list[list[str]]:
    """The fields of the kernel's lines about TCP sockets on the local ``port``. Linux does not list
    a socket that is bound, but neither listening nor connected."""
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in _read(table, MAX_TABLE).splitlines()[1:]:
            fields = line.split()
            if len(fields) > 9 and int(fields[1].rpartition(":")[2], 16) == port:
                found.append(fields)
    return found


def port_holder(port: int) -> str:
    """The process that uses ``port``, and its user if that is another user. Empty if the kernel
    lists none."""
    users = {
        "socket:[%s]" % fields[9]: int(fields[7])
        for fields in tcp_entries(port)
        if fields[9] != "0"
    }
    for uid in users.values():
        owner = "" if uid == os.geteuid() else " of user %s" % _user_name(uid)
        return (_process_with(users) or "a process") + owner
    return ""


def _process_with(sockets: Collection[str]) -> str:
    """The first process that has one of ``sockets`` open; empty if this user can see none."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        folder = "/proc/%s/fd" % pid
        with contextlib.suppress(OSError):  # another user's process, or one that has ended
            for fd in os.listdir(folder):
                if _link(os.path.join(folder, fd)) in sockets:
                    command = _read("/proc/%s/cmdline" % pid, 1 << 12).replace("\0", " ").strip()
                    return "process %s (%s)" % (pid, command[:120])
    return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:  # it has just been closed
        return ""


def _read(path: str, limit: int) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(limit).decode("utf-8", "backslashreplace")
    except OSError:
        return ""


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
