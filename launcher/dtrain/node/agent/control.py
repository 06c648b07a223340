"""How the relays of a run find its supervisor."""

from __future__ import annotations

import contextlib
import os
import socket
import struct

from dtrain.node.agent.processes import environment_of, look
from dtrain.node.agent.wire import RefusedError, raw, shown
from dtrain.node.agent.worker_files import decode, open_regular
from dtrain.node.files import listed, read_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dtrain.node.agent.wire import Json

CONTROL_FD, REQUEST_FD = 7, 8
"""The supervisor's descriptors of its relay, and of its program and request. Setup lines do not
inherit them."""


def control_name(run: str, host: str) -> bytes:
    """A new, unique name of an abstract socket, which needs no file system."""
    return b"\0dtrain/" + (raw(run) + b"/" + raw(host))[:80] + b"/" + os.urandom(4).hex().encode()


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """The process id and user id of the peer."""
    creds = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", creds)
    return pid, uid


SUPERVISOR_RECORD = {"pid": int, "start": int, "machine": str, "folder": str, "socket": str}


MAX_RECORD = 1 << 16
"""Bytes of a supervisor's record."""


class DamagedError(RefusedError):
    """The supervisor's record is not what a supervisor writes."""

    def __init__(self, reason: str) -> None:
        hint = "a process of the job may have changed it; end the job's processes by hand"
        super().__init__("agent", reason, hint)


def record_in(data: bytes, folder: bytes) -> Json | None:
    """The supervisor's record in ``data``, read from the run's ``folder``; None if it is not
    written yet. Raises DamagedError."""
    if not data:
        return None
    record = decode(data)
    if record is None or any(
        type(record.get(name)) is not kind for name, kind in SUPERVISOR_RECORD.items()
    ):
        raise DamagedError(
            "%s/supervisor is damaged, so the supervisor cannot be found" % shown(folder)
        )
    return record


def call(name: bytes) -> socket.socket | None:
    """A connection to an abstract socket; None if it is not accepted at once."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # A blocking connect would wait forever if the listener's queue is full.
        sock.setblocking(False)
        sock.connect(name)
        sock.setblocking(True)
    except (OSError, ValueError):
        sock.close()
        return None
    return sock


def call_supervisor(record: Json) -> socket.socket | None:
    """A connection to the supervisor that wrote ``record``; None if it does not accept it."""
    sock = call(raw(record["socket"]))
    if sock is not None and peer_of(sock) != (record["pid"], os.geteuid()):
        sock.close()
        return None
    return sock


def find_supervisor(folder: bytes) -> socket.socket | None:
    """A connection to the supervisor of the run in ``folder``, found without its record, which a
    process of the job may have removed or changed. None if there is none."""
    prefix = b"@" + b"/".join([b"dtrain", *folder.split(b"/")[-2:]])[:87] + b"/"
    for line in (read_file("/proc/net/unix") or b"").split(b"\n"):
        at = line.find(prefix)
        if at < 0:
            continue
        sock = call(b"\0" + line[at + 1 :])
        if sock is not None:
            pid, uid = peer_of(sock)
            if uid == os.geteuid() and environment_of(pid).get(b"DTRAIN_RUN_DIR") == folder:
                return sock
            sock.close()
    return None


def open_events(pid: int, folder: bytes) -> int:
    """The events file that the supervisor has open: a process of the job may have removed or
    replaced its name. Raises OSError."""
    fds = b"/proc/%d/fd" % pid
    for number in listed(fds) if pid else []:
        path = os.path.join(fds, number)
        with contextlib.suppress(OSError):
            if os.readlink(path).endswith((b"/events", b"/events (deleted)")):
                return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    return open_regular(os.path.join(folder, b"events"))


def lives(record: Json) -> bool:
    """Whether the supervisor that wrote ``record`` still runs on this machine."""
    proc = look(record["pid"])
    return proc is not None and proc.alive and proc.start == record["start"]


def machine_id() -> str:
    """An id that differs between machines and changes with every boot."""
    return shown((read_file("/proc/sys/kernel/random/boot_id") or b"").strip())
