"""Checks which ports are free, and answers at those that are."""

from __future__ import annotations

import contextlib
import errno
import json
import socket
import time

from dtrain.node.facts.socket_loop import FOREVER, READABLE, receive, send, sleep
from dtrain.node.listening import EXHAUSTED, EXHAUSTED_PAUSE, on_all_addresses
from dtrain.node.port_holder import UNKNOWN_HOLDER, bind_alone, port_holder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Collection

    from dtrain.node.facts.files import Json
    from dtrain.node.facts.orders import GatherOrder
    from dtrain.node.facts.socket_loop import SocketLoop, Steps

PIECE = 1 << 14
MAX_LINE = 1 << 20
"""The most bytes to accept from a peer, which may be hostile."""
ANSWER_SECONDS = 30.0
"""The longest that one connection may take."""


class Listener:
    """Answers each connection with this host's name, reads a line and confirms it."""

    def __init__(self, host: str, token: str, loop: SocketLoop) -> None:
        self._greeting = json.dumps([token, host]).encode() + b"\n"
        self._loop = loop

    def open(self, port: int) -> int:
        """Listen on all addresses. Returns the port. Raises OSError if it is taken, also by a
        job that will listen there: it could not while we do."""
        found = []
        try:
            for sock, address in on_all_addresses():
                sock.setblocking(False)
                try:
                    bind_alone(sock, address, port)
                    # A check that is interrupted may leave connections in TIME_WAIT: a launch can
                    # bind beside those only if they have this option, too.
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    sock.listen(512)
                except OSError as error:
                    sock.close()
                    taken = error.errno in (errno.EACCES, errno.EADDRINUSE)
                    if sock.family == socket.AF_INET6 and not taken:
                        continue  # IPv6 is switched off
                    raise
                found.append(sock)
                port = port or sock.getsockname()[1]
        except OSError:
            for sock in found:
                sock.close()
            raise
        for sock in found:
            self._loop.start(self._serve(sock))
        return port

    def _serve(self, listening: socket.socket) -> Steps[None]:
        with listening:
            while True:
                try:
                    yield listening, READABLE, FOREVER
                    self._loop.start(self._answer(listening.accept()[0]))
                except (BlockingIOError, ConnectionError):
                    continue  # the peer has gone
                except OSError as error:
                    if error.errno not in EXHAUSTED:
                        return
                    yield from sleep(EXHAUSTED_PAUSE)

    def _answer(self, peer: socket.socket) -> Steps[None]:
        until = time.monotonic() + ANSWER_SECONDS
        with contextlib.suppress(OSError), peer:
            yield from send(peer, self._greeting, until)
            left, data = MAX_LINE, b"."
            while data[-1:] != b"\n":
                data = yield from receive(peer, PIECE, until)
                left -= len(data)
                if not data or left <= 0:
                    return
            yield from send(peer, b".", until)
            # Let the peer close first: the side that does keeps its port busy for a minute.
            yield peer, READABLE, until


def ports(request: GatherOrder, listener: Listener) -> Json:
    """Whether the job's ports are free. Free ports stay open for other hosts to dial.

    ``draw`` in the request: the first and last port that a launch may draw instead, and how many
    it needs.
    """
    found: Json = {}
    draw = request["draw"]
    for port in request["ports"]:
        try:
            listener.open(port)
            found[str(port)] = {"free": True}
        except OSError as error:
            taken = {"free": False, "reason": error.strerror, "holder": port_holder(port)}
            if error.errno == errno.EADDRINUSE:
                taken["holder"] = taken["holder"] or UNKNOWN_HOLDER
            found[str(port)] = taken
    own = {int(port) for port, one in found.items() if one["free"]}
    if draw is not None and len(own) < len(found):
        room = has_room(*draw, own=own)
        for one in found.values():
            one["room"] = room
    return found


def has_room(low: int, high: int, needed: int, *, own: Collection[int]) -> bool:
    """Whether ``needed`` consecutive ports are free, or open in this process (``own``)."""
    run = 0
    for port in range(low, high + 1):
        run = run + 1 if port in own or can_bind(port) else 0
        if run == needed:
            return True
    return False


def can_bind(port: int) -> bool:
    with socket.socket() as sock:
        try:
            bind_alone(sock, "", port)
        except OSError:
            return False
    return True
