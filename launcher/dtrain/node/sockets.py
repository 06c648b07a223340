"""The sockets of this host's processes, and what the kernel lists through netlink(7)."""

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
ATTRIBUTE = struct.Struct("=HH")
"""struct nlattr"""
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
    request = REQUEST.pack(family, socket.IPPROTO_TCP, extension, states)
    return dumped(NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, request)


def dumped(protocol: int, kind: int, request: bytes) -> Iterator[bytes]:
    """All that the kernel lists of a ``kind``: messages without their headers. Raises OSError."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol) as kernel:
        kernel.settimeout(1.0)
        size = HEADER.size + len(request)
        kernel.send(HEADER.pack(size, kind, REQUEST_DUMP, 0, 0) + request)
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


def attributes(message: bytes, at: int) -> Iterator[tuple[int, bytes]]:
    """The type and value of each attribute in a message, from the offset ``at`` on."""
    while at + ATTRIBUTE.size <= len(message):
        size, kind = ATTRIBUTE.unpack_from(message, at)
        if size < ATTRIBUTE.size:
            return
        yield kind, message[at + ATTRIBUTE.size : at + size]
        at += size + 3 & ~3
