"""The output of eight hosts arrives complete, at full speed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable

import pytest

from cluster import Cluster
from support.cluster import Launcher, job
from support.limits import HANG

pytestmark = pytest.mark.netns


def test_every_byte_of_every_rank(hosts: Callable[..., Cluster], launcher: Launcher) -> None:
    cluster = hosts(8)
    args = ["~/notes", "100000"]
    file = launcher.file(cluster, {"framework": "torch", "script": job("lines.py"), "args": args})
    launch = launcher.start(file, "--rank", "0")
    done = launch.wait(HANG)
    assert done.code == 0, str(done)
    for rank, host in enumerate(cluster.hosts):
        note = json.loads((host.home / "notes" / f"{rank}.json").read_text())
        for name, suffix in (("stdout", "out"), ("stderr", "err")):
            stored = launcher.log(host.name, f"worker-{rank}.{suffix}")
            assert len(stored) == note[name]["size"]
            assert hashlib.sha256(stored).hexdigest() == note[name]["sha256"]
    shown = done.lines("node1", 0)
    assert [line for line in shown if line.startswith("out 0 ")][-1] == "out 0 000099999 abcdefghij"
    assert shown[-1] == "no end"
    assert "100%" in shown
    assert not any(line.startswith("[node2") for line in done.stdout.splitlines())
