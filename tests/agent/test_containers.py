"""The command line of a container engine's client, completed on its host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dtrain.node.agent.containers import Containers
from dtrain.node.agent.wire import RefusedError


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
