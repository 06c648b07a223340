"""Hosts on which something else than a relay answers: told as the host's failure, never ours."""

from __future__ import annotations

import json

import pytest

from dtrain import protocol
from support.launching import Scene


def message(**body: object) -> bytes:
    payload = json.dumps(body).encode()
    return protocol.HEADER.pack(protocol.MESSAGE, 0, 0, len(payload)) + payload


HELLO = message(type="hello", protocol=1, python="3", hostname="h", time=0.0, pid=1)
EXITED = {"event": "exited", "time": 0.0, "index": 0, "code": 1, "stopping": False}


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (b"", "it ended, with status 0"),
        (b"Welcome to node0!\nMaintenance on Friday.\n", "Maintenance on Friday"),
        (protocol.PREAMBLE + b"\xff" * 64, "unreadable frame"),
        (protocol.PREAMBLE + message(type="hello"), "unreadable hello message"),
        (protocol.PREAMBLE + message(typ="hello"), "a message without a type"),
        (protocol.PREAMBLE + protocol.HEADER.pack(protocol.DATA, 7, 0, 1) + b"x", "unknown stream"),
        (
            protocol.PREAMBLE
            + message(type="stream", id=1, name="../../x.out", role="worker", index=0, rank=0),
            "unreadable stream message",
        ),
        (
            protocol.PREAMBLE
            + HELLO
            + message(type="event", offset=1, event={**EXITED, "role": "../../etc"}),
            "unreadable event message",
        ),
        (protocol.PREAMBLE + HELLO + message(type="refused", what="x"), "unreadable refused"),
    ],
)
def test_bad_relay(scene: Scene, said: bytes, told: str) -> None:
    answer = scene.folder / "answer"
    answer.write_bytes(said)
    python = scene.folder / "python"
    python.write_text(f"#!/bin/sh\ncat {answer}\ncat >/dev/null &\n")
    python.chmod(0o755)
    cluster = scene.cluster_file(scene.script("pass"), hosts=1, slots=1)
    cluster.write_text(cluster.read_text().replace("run_dir:", f"python: {python}\n  run_dir:"))
    done = scene.run(cluster)
    assert done.code == 3, done
    assert "problem: node0: " in done.stderr
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(scene.folder.rglob("fault.txt"))
    assert not list(scene.folder.rglob("x.out"))
