"""A launch on this machine, which needs neither root nor a framework."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from dtrain.diagnostics import ExitCode
from support.launching import completed

CLUSTER = """\
cluster: {hosts: [a, b], transport: local, gpus: 0, run_dir: RUN_DIR}
job: {framework: torch, script: train.py}
"""
SCRIPT = """\
import os, sys
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
sys.exit(os.environ["RANK"] == "1" and "--fail" in sys.argv)
"""


def launched(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    (folder / "cluster.yaml").write_text(CLUSTER.replace("RUN_DIR", str(folder / "nodes")))
    (folder / "train.py").write_text(SCRIPT)
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(folder)}
    # The check would require torch.
    command = ("launch", "cluster.yaml", "--no-check", "--", *args)
    return completed(*command, environment=environment, folder=folder)


def test_every_rank_writes_to_the_terminal(tmp_path: Path) -> None:
    done = launched(tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[a 0] rank 0 of 2", "[b 1] rank 1 of 2"]


def test_a_rank_that_fails_is_named(tmp_path: Path) -> None:
    done = launched(tmp_path, "--fail")
    assert done.returncode == ExitCode.JOB_FAILED
    assert "rank 1 on b exited with status 1" in done.stderr
