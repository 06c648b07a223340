"""A program of a pod on a WebSocket (RFC 6455), as the API server's ``exec`` carries it."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from email.message import Message
from typing import IO

from websocket import ABNF
from websocket._abnf import frame_buffer

PROTOCOL = "v5.channel.k8s.io"
STDIN, STDOUT, STDERR, STATUS, CLOSE = 0, 1, 2, 3, 255
_MAGIC = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


def accept(headers: Message) -> Iterator[tuple[str, str]]:
    """The headers of the answer."""
    digest = hashlib.sha1((headers["Sec-WebSocket-Key"] + _MAGIC).encode()).digest()  # noqa: S324
    yield "Upgrade", "websocket"
    yield "Connection", "Upgrade"
    yield "Sec-WebSocket-Accept", base64.b64encode(digest).decode()
    yield "Sec-WebSocket-Protocol", PROTOCOL


def carry(connection: socket.socket, process: subprocess.Popen[bytes]) -> None:
    """Until the program has ended, or the client is gone, which closes the program's stdin."""
    assert process.stdin and process.stdout and process.stderr
    lock = threading.Lock()

    def send(data: bytes, opcode: int = ABNF.OPCODE_BINARY) -> None:
        with lock, contextlib.suppress(OSError):
            connection.sendall(ABNF(1, 0, 0, 0, opcode, 0, data).format())

    def pump(pipe: IO[bytes], channel: int) -> None:
        while data := os.read(pipe.fileno(), 1 << 15):
            send(bytes([channel]) + data)

    reader = threading.Thread(target=_feed, args=(connection, process.stdin, send), daemon=True)
    pumps = [
        threading.Thread(target=pump, args=(process.stdout, STDOUT)),
        threading.Thread(target=pump, args=(process.stderr, STDERR)),
    ]
    for thread in (reader, *pumps):
        thread.start()
    for thread in pumps:
        thread.join()
    send(bytes([STATUS]) + json.dumps(_status(process.wait())).encode())
    send((1000).to_bytes(2, "big"), ABNF.OPCODE_CLOSE)
    # TLS reads by number, which may be that of another open file once the connection is closed.
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RD)  # not TLS: what arrived stays encrypted
    reader.join()


def _feed(connection: socket.socket, stdin: IO[bytes], send: Callable[[bytes, int], None]) -> None:
    def receive(size: int) -> bytes:
        if not (data := connection.recv(size)):
            raise EOFError
        return data

    frames = frame_buffer(receive, True)
    with contextlib.suppress(OSError, ValueError, EOFError), stdin:
        while (frame := frames.recv_frame()).opcode != ABNF.OPCODE_CLOSE:
            if frame.opcode == ABNF.OPCODE_PING:
                send(frame.data, ABNF.OPCODE_PONG)
                continue
            channel, data = frame.data[0], frame.data[1:]
            if channel == CLOSE and data == bytes([STDIN]):
                return
            if channel == STDIN:
                stdin.write(data)
                stdin.flush()


def _status(code: int) -> Mapping[str, object]:
    if code == 0:
        return {"metadata": {}, "status": "Success"}
    if code < 0:
        code = 128 + signal.Signals(-code)
    cause = {"reason": "ExitCode", "message": str(code)}
    return {
        "metadata": {},
        "status": "Failure",
        "message": f"command terminated with non-zero exit code: exit status {code}",
        "reason": "NonZeroExitCode",
        "details": {"causes": [cause]},
    }
