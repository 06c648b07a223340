"""The network interfaces of this host, and the routes through them."""

from __future__ import annotations

import contextlib
import socket
import struct

from dtrain.node.host_name import encoded
from dtrain.node.sockets import attributes, dumped

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Iterator, Mapping

NETLINK_ROUTE, RTM_GETADDR, IFA_ADDRESS, IFA_LOCAL = 0, 22, 1, 2
MESSAGE = struct.Struct("=BBBBI")
"""struct ifaddrmsg"""
LINK = 253
"""The scope of addresses of one link. IPv6 ones are ambiguous without the interface's name."""


def addresses(*, link_local: bool = False) -> dict[str, list[str]]:
    """The addresses of each interface, those of IPv4 first. ``link_local``: with IPv6 ones of this
    scope."""
    names = dict(socket.if_nameindex())
    found: dict[str, list[str]] = {name: [] for name in names.values()}
    for message in dumped(NETLINK_ROUTE, RTM_GETADDR, bytes(MESSAGE.size)):
        family, _, _, scope, index = MESSAGE.unpack_from(message)
        if family == socket.AF_INET6 and scope == LINK and not link_local:
            continue
        its = dict(attributes(message, MESSAGE.size))
        own = its.get(IFA_LOCAL, its.get(IFA_ADDRESS))  # the latter may be a peer's
        if own and index in names and family in (socket.AF_INET, socket.AF_INET6):
            found[names[index]].append(socket.inet_ntop(family, own))
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


def owners() -> dict[str, str]:
    """The interface of each of our addresses. Of several, the one where fewest other addresses come
    first: kube-proxy may repeat the host's address behind those of services."""
    found = [
        (before, address, name)
        for name, its in addresses(link_local=True).items()
        for before, address in enumerate(its)
    ]
    found.sort(key=lambda one: one[0])
    return {address: name for _, address, name in reversed(found)}


def interface_to(target: str, known: Mapping[str, str]) -> str | None:
    """The name of the interface through which this host reaches ``target``, or None if the kernel
    has no route. ``known``: the result of `owners`."""
    for own in sources_towards(target):
        # A router may be the only neighbor: then even a global target has a link-local source.
        address, _, name = own.partition("%")
        found = name or known.get(address)
        if found:
            return found
    return None
