"""Checks which ports are free, and dials other hosts."""

from __future__ import annotations

import contextlib
import errno
import json
import socket
import struct
import threading
import time

from dtrain.node.facts.network import source_towards
from dtrain.node.facts.probing import at_once
from dtrain.node.listening import accept, on_all_addresses
from dtrain.node.port_holder import UNKNOWN_HOLDER, port_holder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Collection

    from dtrain.node.facts.files import Json
    from dtrain.node.facts.orders import DialOrder, GatherOrder

BULK = 256 << 10
"""Bytes that each dialed connection carries, to detect a path that drops large packets."""
LISTENING: list[socket.socket] = []


class Listener:
    """Answers each connection with this host's name, reads `BULK` bytes and confirms them."""

    def __init__(self, host: str, token: str) -> None:
        self._greeting = json.dumps([token, host]).encode() + b"\n"

    def open(self, port: int) -> int:
        """Listen on all addresses. Returns the port. Raises OSError if it is taken."""
        sockets = []
        try:
            for sock, address in on_all_addresses():
                sockets.append(sock)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    sock.bind((address, port))
                    sock.listen(512)
                except OSError as error:
                    taken = error.errno in (errno.EACCES, errno.EADDRINUSE)
                    if sock.family == socket.AF_INET6 and not taken:
                        continue  # IPv6 is switched off
                    raise
                port = port or sock.getsockname()[1]
        except OSError:
            for sock in sockets:
                sock.close()
            raise
        LISTENING.extend(sockets)
        for sock in sockets:
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()
        return port

    def _serve(self, sock: socket.socket) -> None:
        while True:
            try:
                peer = accept(sock)
            except OSError:
                return
            if peer is None:
                continue
            try:
                threading.Thread(target=self._answer, args=(peer,), daemon=True).start()
            except RuntimeError:  # no more threads
                self._answer(peer)

    def _answer(self, peer: socket.socket) -> None:
        with contextlib.suppress(OSError), peer:
            peer.settimeout(30.0)
            peer.sendall(self._greeting)
            left = BULK
            while left > 0:
                data = peer.recv(min(left, 1 << 16))
                if not data:
                    return
                left -= len(data)
            peer.sendall(b".")
            # Let the peer close first: the side that does keeps its port busy for a minute.
            peer.recv(1)


def stop_listening() -> None:
    """Free the job's ports. An accepting thread keeps a socket open until it is shut down."""
    while LISTENING:
        sock = LISTENING.pop()
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        sock.close()


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
        # Ignore closed connections (TIME_WAIT) of an earlier job.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("", port))
        except OSError:
            return False
    return True


def dial(order: DialOrder) -> list[Json]:
    """Connect to every target. Returns the error or the measurements of each. A target is
    ``[host, kind, address, port, own address or null]``."""
    token, limit = order["token"], order["limit"]
    targets = [tuple(target) for target in order["targets"]]
    answers = at_once(lambda target: dial_one(target, token, limit), targets)
    return [
        {"host": target[0], "kind": target[1], "address": target[2], "port": target[3], **answer}
        for target, answer in answers.items()
    ]


def dial_one(target: tuple[Any, ...], token: str, limit: float) -> Json:
    host, kind, address, port, source = target
    begun = time.monotonic()
    try:
        sock = socket.create_connection((address, port), limit, (source, 0) if source else None)
    except socket.timeout:
        return {"error": "no answer within %g s" % limit}
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return {"error": reason.lower()}
    with sock:
        # Reset the connection on close, so that neither side keeps it in TIME_WAIT.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        found: Json = {"seconds": round(time.monotonic() - begun, 6)}
        try:
            who = greeted_by(line_of(sock, begun + limit), token)
            sock.settimeout(limit)
            if who != host:
                return {"error": "wrong", "answered": who}
            found["mss"] = sock.getsockopt(socket.IPPROTO_TCP, 2)
            try:
                sock.sendall(bytes(BULK))
                if sock.recv(1) != b".":
                    return {"error": "the connection was closed"}
            except socket.timeout:
                return {"error": "stalled", "mss": found["mss"]}
        except OSError as error:
            return {"error": (error.strerror or str(error) or "no greeting").lower()}
        found["bulk_seconds"] = round(time.monotonic() - begun, 6)
        if kind == "interface":
            found["source"] = source_towards(address)
        return found


def greeted_by(line: bytes, token: str) -> str:
    """The host whose `Listener` sent this line; empty if another program did."""
    try:
        greeting = json.loads(line)
    except (ValueError, RecursionError):
        return ""
    known = isinstance(greeting, list) and len(greeting) == 2 and greeting[0] == token
    return greeting[1] if known and isinstance(greeting[1], str) else ""


def line_of(sock: socket.socket, deadline: float) -> bytes:
    """The first line from the peer, read until ``deadline`` at most: the peer may be hostile and
    slow. Raises OSError."""
    data = b""
    while not data.endswith(b"\n") and len(data) < 1024:
        sock.settimeout(max(0.01, deadline - time.monotonic()))
        part = sock.recv(1024 - len(data))
        if not part:
            break
        data += part
    return data
