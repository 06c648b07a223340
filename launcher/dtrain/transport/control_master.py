"""A connection to a jump host that `ssh` already holds open (ControlMaster).

The master opens TCP connections for other programs of its user (OpenSSH's PROTOCOL.mux), so
dtrain needs no second login to the jump host. The master has checked the jump host's key. dtrain
checks that the socket and the process behind it belong to the user.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path

import paramiko

from dtrain.framing import clean
from dtrain.transport.endpoint import Endpoint

_HELLO, _NEW_STDIO_FORWARD, _SESSION_OPENED, _FAILURES = (
    0x00000001,
    0x10000008,
    0x80000006,
    {0x80000002, 0x80000003},
)
_VERSION = 4
_REQUEST = 1
_MAX_PACKET = 1 << 18
HELLO_TIMEOUT = 5.0
"""Seconds for a program on this machine to answer."""


class MasterStream:
    """A TCP connection that the jump host opened. It ends with the control connection."""

    def __init__(self, control: socket.socket, write: socket.socket, read: socket.socket) -> None:
        self._control, self._write, self._read = control, write, read

    def send(self, data: bytes, /) -> int:
        return self._write.send(data)

    def recv(self, size: int, /) -> bytes:
        return self._read.recv(size)

    def settimeout(self, seconds: float | None, /) -> None:
        self._write.settimeout(seconds)
        self._read.settimeout(seconds)

    def close(self) -> None:
        for end in (self._write, self._read, self._control):
            # close() does not wake a thread that sleeps in recv; shutdown() does.
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


class ControlMaster:
    """The open connection to ``endpoint`` behind the socket ``path``."""

    def __init__(self, endpoint: Endpoint, path: Path) -> None:
        self.endpoint = endpoint
        self.path = path

    @property
    def alive(self) -> bool:
        try:
            self._greet().close()
        except OSError:
            return False
        return True

    def open_stream(self, address: str, port: int, timeout: float) -> MasterStream:
        """Let the jump host open a TCP connection.

        Raises paramiko's ChannelException if the jump host refuses or cannot, and OSError if the
        master does not answer.
        """
        control = self._greet()
        ours_write, theirs_read = socket.socketpair()
        ours_read, theirs_write = socket.socketpair()
        stream = MasterStream(control, ours_write, ours_read)
        try:
            with theirs_read, theirs_write:
                control.settimeout(timeout)
                request = paramiko.Message()
                request.add_int(_NEW_STDIO_FORWARD).add_int(_REQUEST)
                request.add_string("").add_string(address).add_int(port)
                _send(control, request)
                for end in (theirs_read, theirs_write):
                    socket.send_fds(control, [b"\0"], [end.fileno()])
                reply = _receive(control)
            kind, number = reply.get_int(), reply.get_int()
            if kind in _FAILURES:
                reason = clean(reply.get_binary()[:400].decode(errors="replace"))
                raise paramiko.ChannelException(1 if "prohibited" in reason else 2, reason)
            if (kind, number) != (_SESSION_OPENED, _REQUEST):
                raise OSError("the ControlMaster sent an unknown reply")
        except BaseException:
            stream.close()
            raise
        return stream

    def close(self) -> None:
        """Does nothing: the connection belongs to `ssh`."""

    def _greet(self) -> socket.socket:
        status = self.path.lstat()
        if not stat.S_ISSOCK(status.st_mode) or status.st_uid != os.getuid():
            raise PermissionError(f"{self.path} is not a socket of this user")
        control = socket.socket(socket.AF_UNIX)
        try:
            control.settimeout(HELLO_TIMEOUT)
            control.connect(str(self.path))
            if _peer_user(control) != os.getuid():
                raise PermissionError(f"{self.path} belongs to a process of another user")
            _send(control, paramiko.Message().add_int(_HELLO).add_int(_VERSION))
            hello = _receive(control)
            if (hello.get_int(), hello.get_int()) != (_HELLO, _VERSION):
                raise OSError(f"the program behind {self.path} is not a ControlMaster")
        except BaseException:
            control.close()
            raise
        return control


def find(endpoint: Endpoint) -> ControlMaster | None:
    """The open connection to a jump host, if any."""
    if endpoint.control_path is None:
        return None
    master = ControlMaster(endpoint, endpoint.control_path)
    return master if master.alive else None


def _peer_user(control: socket.socket) -> int:
    """The user id of the process at the other end."""
    if sys.platform == "linux":
        peer = control.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return int(struct.unpack("3i", peer)[1])
    # struct xucred of macOS and the BSDs begins with its version and the user; SOL_LOCAL is 0.
    peer = control.getsockopt(0, socket.LOCAL_PEERCRED, 76)
    return int(struct.unpack_from("=II", peer)[1])


def _send(control: socket.socket, message: paramiko.Message) -> None:
    body = message.asbytes()
    control.sendall(struct.pack(">I", len(body)) + body)


def _receive(control: socket.socket) -> paramiko.Message:
    """The next message, within the timeout of ``control``."""
    deadline = time.monotonic() + (control.gettimeout() or HELLO_TIMEOUT)
    (size,) = struct.unpack(">I", _exactly(control, 4, deadline))
    if size > _MAX_PACKET:
        raise OSError("the ControlMaster sent a reply that is too long")
    return paramiko.Message(_exactly(control, size, deadline))


def _exactly(control: socket.socket, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the ControlMaster did not answer in time")
        control.settimeout(left)
        piece = control.recv(size - len(data))
        if not piece:
            raise ConnectionResetError("the ControlMaster closed the connection")
        data += piece
    return data
