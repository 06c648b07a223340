"""A launch connects to its hosts before it has imported what shows the run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.launching import PATIENCE, Scene
from support.sshd import running_sshd

WAITS = """
import sys
class Import:
    def find_spec(self, name, path=None, target=None):
        if name == "dtrain_cli.commands.watch":
            sys.stdin.readline()
sys.meta_path.insert(0, Import())
from dtrain_cli.__main__ import main
main()
"""
"""`dtrain`, which gets a line before it imports its views."""


@pytest.mark.sshd
def test_a_launch_logs_in_before_there_is_a_view(scene: Scene, tmp_path: Path) -> None:
    """A notice from the connection is shown once there is one."""
    with running_sshd(tmp_path) as sshd:
        ssh = {"port": sshd.port, "identity": str(sshd.identity), "host_keys": "accept-new"}
        hosts = {
            "hosts": ["a"],
            "gpus": 0,
            "python": sys.executable,
            "run_dir": str(scene.nodes),
            "ssh": {**ssh, "known_hosts": str(tmp_path / "none")},
            "overrides": {"a": {"address": "127.0.0.1"}},
        }
        script = scene.script("print('trained')")
        file = scene.write({"cluster": hosts, "job": {"framework": "torch", "script": str(script)}})
        launch = subprocess.Popen(
            [sys.executable, "-c", WAITS, "launch", str(file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "DTRAIN_HOME": str(scene.home)},
            text=True,
        )
        sshd.wait_for_log("Accepted publickey")
        output, messages = launch.communicate("\n", PATIENCE)
    assert launch.returncode == 0, messages
    assert "trained" in output
    assert "a: accepted the new host key" in messages
