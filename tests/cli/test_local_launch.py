"""A launch on this machine, which needs neither root nor a framework."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from dtrain.diagnostics import ExitCode
from dtrain.runs import journal
from support.launching import completed
from support.limits import until

CLUSTER = """\
cluster: {hosts: [a, b], transport: local, gpus: 0, run_dir: RUN_DIR}
job: {framework: torch, script: train.py}
"""
SCRIPT = """\
import os, sys
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
sys.exit(os.environ["RANK"] == "1" and "--fail" in sys.argv)
"""


# The check would require torch.
COMMAND = ("launch", "cluster.yaml", "--no-check")


def prepared(folder: Path) -> dict[str, str]:
    """The environment of a launch in ``folder``."""
    (folder / "cluster.yaml").write_text(CLUSTER.replace("RUN_DIR", str(folder / "nodes")))
    (folder / "train.py").write_text(SCRIPT)
    return {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(folder)}


def launched(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return completed(*COMMAND, "--", *args, environment=prepared(folder), folder=folder)


def test_every_rank_writes_to_the_terminal(tmp_path: Path) -> None:
    done = launched(tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[a 0] rank 0 of 2", "[b 1] rank 1 of 2"]


def test_a_rank_that_fails_is_named(tmp_path: Path) -> None:
    done = launched(tmp_path, "--fail")
    assert done.returncode == ExitCode.JOB_FAILED
    assert "rank 1 on b exited with status 1" in done.stderr


def test_a_job_does_not_wait_for_the_terminal_that_its_launcher_leaves(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    try:
        while True:
            os.write(writing, bytes(1 << 12))
    except BlockingIOError:
        os.set_blocking(writing, True)

    def is_over() -> bool:
        journals = tmp_path.glob(".dtrain/runs/*/journal.jsonl")
        return any(journal.END in one.read_bytes() for one in journals)

    with subprocess.Popen(
        [sys.executable, "-m", "dtrain_cli", *COMMAND, "--detach", "--", "--fail"],
        cwd=tmp_path,
        env=prepared(tmp_path),
        stdin=subprocess.DEVNULL,
        stdout=writing,
        stderr=writing,
    ):
        os.close(writing)
        until(is_over)
        os.close(reading)
