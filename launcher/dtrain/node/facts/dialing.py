"""Dials other hosts."""

from __future__ import annotations

import errno
import json
import os
import resource
import socket
import struct
import threading
import time

from dtrain.node.facts.network import look_up
from dtrain.node.facts.probing import reason_of
from dtrain.node.facts.socket_loop import READABLE, receive, send, sleep
from dtrain.node.interfaces import sources_towards
from dtrain.node.listening import EXHAUSTED, EXHAUSTED_PAUSE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from dtrain.node.facts.files import Json
    from dtrain.node.facts.network import Places
    from dtrain.node.facts.orders import DialOrder
    from dtrain.node.facts.socket_loop import SocketLoop, Steps

AT_ONCE = 128
"""The most connections that one host dials at the same time."""
MAX_GREETING = 1024
RESET_ON_CLOSE = struct.pack("ii", 1, 0)
"""The value of SO_LINGER that keeps neither side of a closed connection in TIME_WAIT."""


def dial(order: DialOrder, loop: SocketLoop) -> list[Json]:
    """Connect to every target. Returns the error or the measurements of each. A target is
    ``[host, kind, address, port, own address or null]``."""
    targets = order["targets"]
    places = look_up(address for _, _, address, _, _ in targets)
    left = iter(targets)
    found: list[Json] = []
    complete = threading.Event()

    def work() -> Steps[None]:
        for target in left:
            host, kind, address, port, _ = target
            answer = yield from dial_one(target, places[address], order["token"], order["limit"])
            found.append({"host": host, "kind": kind, "address": address, "port": port, **answer})
            if len(found) == len(targets):
                complete.set()

    # As many other hosts dial this one at the same time.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4
    loop.start(*(work() for _ in targets[: AT_ONCE if most < 0 else min(AT_ONCE, most)]))
    if targets:
        complete.wait()
    return found


def dial_one(
    target: tuple[Any, ...], places: Places | Exception, token: str, limit: float
) -> Steps[Json]:
    """The error or the measurements of one target."""
    host, kind, address, port, source = target
    try:
        if isinstance(places, Exception):
            raise places
        sock = yield from connect(places, port, source, limit)
    except socket.timeout:
        return {"error": "no answer within %g s" % limit}
    except (OSError, UnicodeError) as error:
        return {"error": reason_of(error)}
    found: Json = {}
    with sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        try:
            answered = greeted_by((yield from read_line(sock, time.monotonic() + limit)), token)
            if answered != host:
                return {"error": "wrong", "answered": answered}
            found["mss"] = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
            try:
                confirmed = yield from send_line(sock, found["mss"], time.monotonic() + limit)
            except socket.timeout:
                return {"error": "stalled", "mss": found["mss"]}
        except OSError as error:
            return {"error": reason_of(error) or "no greeting"}
    if not confirmed:
        return {"error": "the connection was closed"}
    if kind == "interface":
        found["source"] = next(sources_towards(address), None)
    return found


def connect(places: Places, port: int, source: str | None, limit: float) -> Steps[socket.socket]:
    """A connection to the first address that answers, each within ``limit`` seconds. Raises the
    OSError of the last.

    Waits until there is something to read: our hosts greet, so that takes one wait less."""
    failure = OSError("no address")
    for family, place in places:
        sock = yield from new_socket(family, time.monotonic() + limit)
        try:
            if source:
                sock.bind((source, 0))
            error = sock.connect_ex((place[0], port, *place[2:]))
            if error == errno.EINPROGRESS:
                try:
                    yield sock, READABLE, time.monotonic() + limit
                except socket.timeout:
                    if is_connected(sock):  # to another program, which waits for us
                        raise OSError("timed out") from None
                    raise
                error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                raise OSError(error, os.strerror(error))
            return sock
        except OSError as error:
            sock.close()
            failure = error
    raise failure


def new_socket(family: int, until: float) -> Steps[socket.socket]:
    """A socket, once this process can open one. Raises OSError."""
    while True:
        try:
            return socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        except OSError as error:
            if error.errno not in EXHAUSTED or time.monotonic() > until:
                raise
        yield from sleep(EXHAUSTED_PAUSE)


def is_connected(sock: socket.socket) -> bool:
    try:
        sock.getpeername()
    except OSError:
        return False
    return True


def send_line(sock: socket.socket, mss: int, until: float) -> Steps[bool]:
    """Whether the peer confirms that it received a line. Its first packet is as large as the route
    allows, to detect one that drops such packets. Raises OSError."""
    yield from send(sock, bytes(mss) + b"\n", until)
    return (yield from receive(sock, 1, until)) == b"."


def read_line(sock: socket.socket, until: float) -> Steps[bytes]:
    """The first line from the peer, which may be hostile and slow. Raises OSError."""
    data = b""
    while not data.endswith(b"\n") and len(data) < MAX_GREETING:
        part = yield from receive(sock, MAX_GREETING - len(data), until)
        if not part:
            break
        data += part
    return data


def greeted_by(line: bytes, token: str) -> str:
    """The host whose `Listener` sent this line; empty if another program did."""
    try:
        greeting = json.loads(line)
    except (ValueError, RecursionError):
        return ""
    known = isinstance(greeting, list) and len(greeting) == 2 and greeting[0] == token
    return greeting[1] if known and isinstance(greeting[1], str) else ""
