"""Workers that run through the client of a container engine."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from dtrain.node.agent.containers import Containers
from dtrain.node.agent.wire import RefusedError
from support.limits import HANG, until
from support.node import Node


@pytest.mark.parametrize(
    ("engine", "folder", "said"),
    [
        ("podman", "/data/a b:c", ""),
        ("podman", "/data/a,b", "podman cannot mount /data/a,b: the name has a comma or quote"),
        ("docker", '/data/"a"', "the name has a comma or quote"),
        ("enroot", "/data/a,b", ""),
        ("enroot", "/data/a b", "enroot cannot mount /data/a b: the name has a colon or space"),
    ],
)
def test_a_folder_whose_name_the_engine_cannot_mount(
    tmp_path: Path, engine: str, folder: str, said: str
) -> None:
    client = tmp_path / engine
    client.write_text("#!/bin/sh\n")
    client.chmod(0o755)
    body: Any = {"program": engine}
    request: Any = {"absolute_workdir": folder, "folder": "/run"}
    one = Containers(body, request, {b"PATH": str(tmp_path).encode()}, {})
    words: Any = [[engine], ["--mount"], ["src=", {"node": "workdir"}, ",dst=/x"]]
    if not said:
        assert one.argv(words)[2] == f"src={folder},dst=/x".encode()
        return
    with pytest.raises(RefusedError) as caught:
        one.argv(words)
    assert said in caught.value.message["reason"]


def test_a_slow_engine_does_not_silence_the_supervisor(host: Node) -> None:
    """The relay kills a supervisor that does not answer while its job ends."""
    wait = 'touch "$0/removing"; until test -e "$0/go"; do sleep 0.05; done'
    engine = {
        "program": "env",
        "prefix": "",
        "left_out": [],
        "waits": True,
        "remove": ["sh", "-c", wait, str(host.workdir)],
    }
    agent = host.start(host.shell("true", container=[["env"]]), containers=engine)
    agent.event("started")
    record = json.loads((host.folder() / "supervisor").read_text())
    until((host.workdir / "removing").exists)
    with socket.socket(socket.AF_UNIX) as relay:
        relay.settimeout(HANG)
        relay.connect(record["socket"])
        relay.sendall(b'{"op":"ping"}\n')
        assert relay.recv(4096) == b'{"type":"pong"}\n'
    (host.workdir / "go").touch()
    assert agent.event("ended")["survivors"] == []
    assert agent.wait() == 0
