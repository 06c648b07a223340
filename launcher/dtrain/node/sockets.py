"""The sockets of this host's processes, and the kernel's TCP connections."""

from __future__ import annotations

import contextlib
import os
import socket
import struct

from dtrain.node.files import listed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Iterable, Iterator

NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, REQUEST_DUMP = 4, 20, 0x301
HEADER = struct.Struct("=IHHII")
"""struct nlmsghdr"""
REQUEST = struct.Struct("=BBBxI48x")
"""struct inet_diag_req_v2"""
NLMSG_ERROR, NLMSG_DONE = 2, 3


def inodes_of(pid: int, descriptors: Iterable[str] | None = None) -> Iterator[int]:
    """The inodes of a process's sockets, or of those among ``descriptors``."""
    folder = "/proc/%d/fd" % pid
    for one in listed(folder) if descriptors is None else descriptors:
        with contextlib.suppress(OSError):  # it has just been closed
            kind, _, inode = os.readlink("%s/%s" % (folder, one)).partition(":[")
            if kind == "socket":
                yield int(inode[:-1])


def connections_of(family: int, states: int, extension: int = 0) -> Iterator[bytes]:
    """A struct inet_diag_msg, with its attributes, for each TCP connection in one of ``states`` (a
    bit mask). From sock_diag(7): /proc/net/tcp takes ten times as long.

    Raises OSError if the kernel has no CONFIG_INET_DIAG.
    """
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(1.0)
        body = REQUEST.pack(family, socket.IPPROTO_TCP, extension, states)
        size = HEADER.size + len(body)
        kernel.send(HEADER.pack(size, SOCK_DIAG_BY_FAMILY, REQUEST_DUMP, 0, 0) + body)
        while True:
            data = kernel.recv(1 << 16)
            while data:
                size, kind = HEADER.unpack_from(data)[:2]
                message = data[HEADER.size : size]
                if kind in (NLMSG_ERROR, NLMSG_DONE):
                    code = -struct.unpack_from("=i", message)[0]
                    if code:
                        raise OSError(code, os.strerror(code))
                    return
                yield message
                data = data[(size + 3) & ~3 :]
