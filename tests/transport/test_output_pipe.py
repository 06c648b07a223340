"""The output of a command on an SSH channel that a function receives."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import paramiko
import pytest

from dtrain.transport.ssh import SshTransport
from dtrain.transport.ssh_connection import (
    WINDOW,
    BoundedPacketizer,
    ClientTransport,
    OutputPipe,
)
from support.limits import HANG
from support.sshd import host_on, running_sshd


def test_an_empty_piece_is_not_the_end() -> None:
    received: list[bytes] = []
    pipe = OutputPipe(paramiko.Channel(0))
    pipe.follow(lambda data: not received.append(data))
    pipe.feed(b"")
    assert received == []


def test_output_that_nobody_wants_is_not_acknowledged() -> None:
    received: list[bytes] = []
    pipe = OutputPipe(paramiko.Channel(0))  # without a connection, so an acknowledgement fails
    pipe.follow(lambda data: bool(received.append(data)))
    pipe.feed(b"first")
    pipe.feed(b"second")
    assert received == [b"first"]


@pytest.mark.sshd
@pytest.mark.parametrize("who", ["server", "client"])
def test_output_continues_after_new_keys(
    who: str, tmp_path: Path, transport: SshTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Many exchanges within one window: output that arrives during an exchange is acknowledged late.
    if who == "client":
        monkeypatch.setattr(BoundedPacketizer, "REKEY_BYTES", 1 << 20)
    exchanges = []
    parse = ClientTransport._parse_newkeys

    def count(self: ClientTransport, message: paramiko.Message) -> None:
        exchanges.append(message)
        parse(self, message)

    monkeypatch.setattr(ClientTransport, "_parse_newkeys", count)
    settings = {"RekeyLimit": "1M"} if who == "server" else {}
    with running_sshd(tmp_path / "server", settings=settings) as sshd:
        connection = transport.connect(host_on(sshd, "gpu01"))
        process = connection.start(f"head -c {3 * WINDOW} /dev/zero")
        size, ended = 0, threading.Event()

        def receive(data: Any) -> bool:
            nonlocal size
            if not data:
                ended.set()
            size += len(data)
            return True

        process.follow(receive)
        assert ended.wait(HANG)
        connection.close()
    assert size == 3 * WINDOW
    assert len(exchanges) > 3
