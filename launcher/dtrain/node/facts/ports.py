"""Ports that are free, and hosts that dial each other."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import struct
import threading
import time

from dtrain.node.facts.files import listed, text_of, user_name
from dtrain.node.facts.network import source_towards
from dtrain.node.facts.probing import at_once

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Collection

    from dtrain.node.facts.files import Json

BULK = 256 << 10
"""Bytes that each dialed connection carries, so that a path that swallows large packets shows."""
LISTENING: list[socket.socket] = []


class Listener:
    """Answers whoever dials with this host's name, then swallows `BULK` bytes and says so."""

    def __init__(self, host: str, token: str) -> None:
        self._greeting = json.dumps([token, host]).encode() + b"\n"

    def open(self, port: int) -> int:
        """Listen on all addresses; the port. Raises OSError if it is taken."""
        made = []
        try:
            for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
                try:
                    sock = socket.socket(family, socket.SOCK_STREAM)
                except OSError:
                    continue  # no IPv6 here
                made.append(sock)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                try:
                    sock.bind((address, port))
                    sock.listen(512)
                except OSError as error:
                    if family == socket.AF_INET6 and error.errno not in (13, 98):
                        continue  # IPv6 is switched off
                    raise
                port = port or sock.getsockname()[1]
        except OSError:
            for sock in made:
                sock.close()
            raise
        LISTENING.extend(made)
        for sock in made:
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()
        return port

    def _serve(self, sock: socket.socket) -> None:
        while True:
            try:
                peer, _ = sock.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(peer,), daemon=True).start()

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
            # Whoever closes first keeps the port busy for a minute, and here it is the job's.
            peer.recv(1)


def stop_listening() -> None:
    """Free the job's ports. A thread that accepts keeps a socket open until it is shut down."""
    while LISTENING:
        sock = LISTENING.pop()
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        sock.close()


def ports(request: Json, listener: Listener) -> Json:
    """Whether the job's ports are free. Those that are stay open, for the others to dial.

    ``draw``: the first and last port that a launch may draw instead, and how many it needs.
    """
    found: Json = {}
    draw = request.get("draw")
    for port in request["ports"]:
        try:
            listener.open(port)
            found[str(port)] = {"free": True}
        except OSError as error:
            taken = {"free": False, "reason": error.strerror, "holder": holder(port)}
            if error.errno == errno.EADDRINUSE:
                taken["holder"] = taken["holder"] or UNNAMED
            found[str(port)] = taken
    own = {int(port) for port, one in found.items() if one["free"]}
    if draw is not None and len(own) < len(found):
        room = has_room(*draw, own=own)
        for one in found.values():
            one["room"] = room
    return found


UNNAMED = "a process that does not listen there, such as another launch; Linux does not say which"


def has_room(low: int, high: int, needed: int, *, own: Collection[int]) -> bool:
    """Whether so many consecutive ports are free. We have our ``own`` open."""
    run = 0
    for port in range(low, high + 1):
        run = run + 1 if port in own or can_bind(port) else 0
        if run == needed:
            return True
    return False


def can_bind(port: int) -> bool:
    with socket.socket() as sock:
        # The closed connections of an earlier job are no obstacle.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("", port))
        except OSError:
            return False
    return True


def holder(port: int) -> str:
    """The process that listens on ``port``, where this user may see it, and its user."""
    users: dict[str, int] = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in (text_of(table) or "").splitlines()[1:]:
            fields = line.split()
            if int(fields[1].rpartition(":")[2], 16) == port and fields[3] == "0A":
                users["socket:[%s]" % fields[9]] = int(fields[7])
    for uid in users.values():
        owner = "" if uid == os.geteuid() else " of user %s" % user_name(uid)
        return (process_with(users) or "a process") + owner
    return ""


def process_with(sockets: Collection[str]) -> str:
    """The first process that has one of ``sockets`` open; empty if none can be seen."""
    for name in listed("/proc"):
        for fd in listed("/proc/%s/fd" % name) if name.isdigit() else ():
            with contextlib.suppress(OSError):
                if os.readlink("/proc/%s/fd/%s" % (name, fd)) in sockets:
                    words = (text_of("/proc/%s/cmdline" % name) or "").replace("\0", " ")
                    return "process %s (%s)" % (name, words.strip()[:120])
    return ""


def dial(order: Json) -> list[Json]:
    """Connect to every target; what failed, and what is odd. A target is
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
        # Closing resets the connection: it lingers on neither side.
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
    """The host whose `Listener` sent this line; empty where something else did."""
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        return ""
    known = isinstance(said, list) and len(said) == 2 and said[0] == token
    return said[1] if known and isinstance(said[1], str) else ""


def line_of(sock: socket.socket, deadline: float) -> bytes:
    """Raises OSError. The peer may be slow on purpose."""
    data = b""
    while not data.endswith(b"\n") and len(data) < 1024:
        sock.settimeout(max(0.01, deadline - time.monotonic()))
        part = sock.recv(1024 - len(data))
        if not part:
            break
        data += part
    return data
