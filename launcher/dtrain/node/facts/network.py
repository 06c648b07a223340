"""Facts about host names, interfaces, routes and InfiniBand."""

from __future__ import annotations

import contextlib
import os
import socket
import time

from dtrain.node.facts.probing import at_once, reason_of
from dtrain.node.files import listed, number, text_of
from dtrain.node.host_name import encoded
from dtrain.node.interfaces import addresses as own_addresses
from dtrain.node.interfaces import interface_to, owners

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Iterable, List, Tuple

    from dtrain.node.facts.files import Json
    from dtrain.node.facts.orders import GatherOrder

    Places = List[Tuple[int, Any]]
    """The family and address of the sockets that a name stands for."""

MAX_ADDRESSES = 256
"""Of one interface: kube-proxy may give one those of all services of a cluster."""


def look_up(names: Iterable[str]) -> dict[str, Places | Exception]:
    """The socket addresses of each name, or the error. A name may take seconds, so all are looked
    up at the same time. An address takes no time, and needs no thread."""
    found: dict[str, Places | Exception] = {}
    for name in names:
        found[name] = places_of(name, socket.AI_NUMERICHOST)
    unknown = [name for name, places in found.items() if not isinstance(places, list)]
    return {**found, **at_once(places_of, unknown)}


def places_of(name: str, flags: int = 0) -> Places | Exception:
    try:
        found = socket.getaddrinfo(encoded(name), 0, type=socket.SOCK_STREAM, flags=flags)
    except (OSError, UnicodeError) as error:
        return error
    return [(family, place) for family, _, _, _, place in found]


def addresses(places: Places | Exception) -> Json:
    if isinstance(places, Exception):
        return {"error": reason_of(places)}
    return {"addresses": list(dict.fromkeys(str(place[0]) for _, place in places))}


def names(request: GatherOrder) -> Json:
    """The addresses of all host names on this host, and how long a look-up of the first host's
    address takes."""
    answers = {
        name: addresses(places) for name, places in look_up(request["addresses"].values()).items()
    }
    found: Json = {
        "own": addresses(places_of(socket.gethostname())),
        "hosts": {host: answers[address] for host, address in request["addresses"].items()},
    }
    reached: Json = next(iter(answers.values()), {})
    first = reached.get("addresses") or []
    if first:
        begun = time.monotonic()
        with contextlib.suppress(OSError):
            socket.getnameinfo((first[0], 0), 0)
        found["reverse_seconds"] = round(time.monotonic() - begun, 3)
    return found


def interfaces() -> dict[str, Json]:
    """Every network interface with its addresses."""
    found: dict[str, Json] = {}
    for name, its in own_addresses().items():
        base = "/sys/class/net/" + name
        speed = number(text_of(base + "/speed"))
        found[name] = {
            "addresses": its[:MAX_ADDRESSES],
            "up": bool(int(text_of(base + "/flags") or "0", 16) & 1),
            "state": text_of(base + "/operstate"),
            "mtu": number(text_of(base + "/mtu")),
            # Megabits per second; -1 or empty for virtual interfaces.
            "speed": speed if speed and speed > 0 else None,
        }
    return found


def network(request: GatherOrder) -> Json:
    own = owners()
    routes = {
        host: interface_to(address, own)
        for host, address in request["addresses"].items()
        if host != request["host"]
    }
    found: Json = {"interfaces": interfaces(), "routes": routes}
    # "client's address, client's port, own address, own port"
    connection = os.environ.get("SSH_CONNECTION", "").split()
    if len(connection) == 4:
        found["ssh_address"] = connection[2]
    return found


def infiniband(_request: GatherOrder) -> Json:
    """The ports of all RDMA devices, by ``device/port``."""
    found: Json = {}
    base = "/sys/class/infiniband"
    for device in listed(base):
        for port in listed("%s/%s/ports" % (base, device)):
            place = "%s/%s/ports/%s/" % (base, device, port)
            found["%s/%s" % (device, port)] = {
                "state": (text_of(place + "state") or "").partition(": ")[2],
                "rate": number(text_of(place + "rate")),
            }
    return found
