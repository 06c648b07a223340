"""How the relays of a run find its supervisor, and what a supervisor is started with."""

from __future__ import annotations

import os
import socket
import struct

from dtrain.node.agent.processes import look, read_file
from dtrain.node.agent.wire import RefusedError, raw, shown
from dtrain.node.agent.worker_files import decode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dtrain.node.agent.wire import Json

CONTROL_FD, REQUEST_FD = 7, 8
"""Where the supervisor finds its relay, and its code and request; setup never sees them."""
STAGE = (
    "import os,marshal;boot=os.fdopen(8,'rb');code=marshal.loads(boot.read(int(boot.readline())));"
    "exec(code)"
)


def control_name(run: str, host: str) -> bytes:
    """Of an abstract socket, so that no file system has to carry it; never the same twice."""
    return b"\0dtrain/" + (raw(run) + b"/" + raw(host))[:80] + b"/" + os.urandom(4).hex().encode()


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Process id and user id at the other end."""
    creds = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", creds)
    return pid, uid


SUPERVISOR_RECORD = {"pid": int, "start": int, "machine": str, "folder": str, "socket": str}


MAX_RECORD = 1 << 16
"""Bytes of a supervisor's record."""


def record_in(data: bytes, folder: bytes) -> Json | None:
    """The supervisor's record in ``data``, read from the run's ``folder``; None if it is not
    written yet. Raises RefusedError for a record that no supervisor writes."""
    if not data:
        return None
    record = decode(data)
    if record is None or any(
        type(record.get(name)) is not SUPERVISOR_RECORD[name] for name in SUPERVISOR_RECORD
    ):
        raise RefusedError(
            "agent",
            "%s/supervisor is damaged, so the supervisor cannot be found" % shown(folder),
            "a process of the job may have written to it; end the job's processes by hand",
        )
    return record


def call(name: bytes) -> socket.socket | None:
    """A connection to an abstract socket, if somebody listens and takes it at once."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Where nobody accepts, a full queue would otherwise be waited for without end.
        sock.setblocking(False)
        sock.connect(name)
        sock.setblocking(True)
    except (OSError, ValueError):
        sock.close()
        return None
    return sock


def call_supervisor(record: Json) -> socket.socket | None:
    """A connection to the supervisor that left this ``record``, if it is there and takes it."""
    sock = call(raw(record["socket"]))
    if sock is not None and peer_of(sock) != (record["pid"], os.geteuid()):
        sock.close()
        return None
    return sock


def lives(record: Json) -> bool:
    """Whether the supervisor that left this ``record`` is still a process of this machine."""
    proc = look(record["pid"])
    return proc is not None and proc.alive and proc.start == record["start"]


def machine_id() -> str:
    """Changes with every start of the machine, and differs between machines."""
    return shown((read_file("/proc/sys/kernel/random/boot_id") or b"").strip())
