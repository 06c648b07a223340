"""The network interfaces of this host, and the routes through them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct

from dtrain.node.files import text_of
from dtrain.node.host_name import encoded

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Iterator

SIOCGIFADDR = 0x8915
LINK_LOCAL = "20"
"""The scope of IPv6 addresses that are ambiguous without the interface's name."""


def addresses(*, link_local: bool = False) -> dict[str, list[str]]:
    """The addresses of each interface: the first IPv4 one, and all IPv6 ones. ``link_local``: with
    those of this scope."""
    found: dict[str, list[str]] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            found[name] = []
            with contextlib.suppress(OSError):  # no IPv4 address
                asked = struct.pack("256s", os.fsencode(name))
                found[name].append(socket.inet_ntoa(fcntl.ioctl(sock, SIOCGIFADDR, asked)[20:24]))
    for line in (text_of("/proc/net/if_inet6") or "").splitlines():
        fields = line.split()
        if fields[-1] in found and (link_local or fields[3] != LINK_LOCAL):
            packed = bytes.fromhex(fields[0])
            found[fields[-1]].append(socket.inet_ntop(socket.AF_INET6, packed))
    return found


def sources_towards(target: str) -> Iterator[str]:
    """Our own address on each route to ``target``; none without a route. Sends no packet."""
    try:
        found = socket.getaddrinfo(encoded(target), 9, type=socket.SOCK_DGRAM)
    except (OSError, ValueError):  # unknown or not a valid name
        return
    for family, kind, _, _, place in found:
        with contextlib.suppress(OSError):
            with socket.socket(family, kind) as probe:
                probe.connect(place)
                own, _, *more = probe.getsockname()
            if any(more[1:]):  # Python leaves out the interface of a link-local address
                own += "%" + socket.if_indextoname(more[1])
            yield own


def interface_to(target: str) -> bytes | None:
    """The name of the interface through which this host reaches ``target``, or None if the kernel
    has no route."""
    for own in sources_towards(target):
        _, _, name = own.partition("%")  # of a link-local address
        # A router may be the only neighbor: then even a global target has a link-local source.
        known = addresses(link_local=True).items()
        names = [name] if name else [one for one, its in known if own in its]
        if names:
            return os.fsencode(names[0])
    return None
