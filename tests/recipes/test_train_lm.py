"""The training recipe learns, alone and under the README's first launch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.cluster import Launcher
from support.launching import IDLE
from support.limits import HANG

pytestmark = pytest.mark.torch

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "scripts" / "recipes" / "train_lm.py"
STEP = re.compile(r"step (\d+)/(\d+) mean loss (\d+\.\d\d) \d+\.\dk tokens/s")


def losses(lines: list[str]) -> list[float]:
    return [float(found[3]) for line in lines if (found := STEP.fullmatch(line))]


def assert_learns(found: list[float]) -> None:
    """The loss falls steadily from a uniform guess among 256 bytes (5.55)."""
    assert found == sorted(found, reverse=True)
    assert 5 < found[0] < 6.5
    assert found[-1] < 4


def test_one_process_needs_no_launcher(tmp_path: Path) -> None:
    weights = tmp_path / "made" / "weights.pt"
    command = [sys.executable, str(RECIPE), "--steps", "10", "--every", "5"]
    environment = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
    environment |= IDLE
    done = subprocess.run(
        [*command, "--corpus", str(ROOT / "scripts"), "--save", str(weights), "--device", "cpu"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=HANG,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert_learns(losses(done.stdout.splitlines()))
    assert weights.stat().st_size > 1 << 20


def test_two_nodes_of_two_workers_on_this_machine(launcher: Launcher) -> None:
    options = ["--no-check", "--", "--steps", "6", "--every", "3"]
    done = launcher.run(ROOT / "configs" / "local.yaml", *options)
    assert done.code == 0, str(done)
    for rank, host in enumerate(["node0", "node0", "node1", "node1"]):
        found = losses(done.lines(host, rank))
        assert len(found) == 3, str(done)
        assert_learns(found)
    assert "held-out loss after training" in done.stdout
    (run,) = (launcher.home / "runs").iterdir()
    report = launcher.command("report", run.name).wait()
    assert re.search(r"^Goodput +\d", report.stdout, re.MULTILINE), str(report)
    said = {shape(line) for line in (done.stdout + done.stderr).splitlines()}
    assert {shape(line) for line in shown_in_the_readme()} - said == set()


def shown_in_the_readme() -> list[str]:
    """The output that the README shows for the demo, without the line of the job's progress: a
    short job may end before one is due."""
    _, _, after = (ROOT / "README.md").read_text(encoding="utf-8").partition("```\ndtrain: ")
    block, _, _ = after.partition("```\n")
    lines = f"dtrain: {block}".splitlines()
    return [line for line in lines if line != "…" and not line.startswith("dtrain: step")]


def shape(line: str) -> str:
    """A line without its numbers, its worker, the run's name and the path of the logs."""
    line = re.sub(r"^\[node\d \d\]", "[worker]", line)
    line = re.sub(r"done in [\d mins]+:", "done in a while:", line)
    line = re.sub(r"run \S+,", "run,", line)
    line = re.sub(r"logs in \S+", "logs in a folder", line)
    return re.sub(r"\d+(\.\d+)?", "N", line)


def test_ranks_share_a_corpus_without_overlap(tmp_path: Path) -> None:
    from train_lm import corpus_files, read_shard

    (tmp_path / "a.txt").write_bytes(bytes(range(200)))
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper" / "b.md").write_bytes(bytes(range(200, 256)))
    (tmp_path / "picture.png").write_bytes(b"\0" * 100)
    files = corpus_files(tmp_path)
    read = [
        byte
        for held_out in (False, True)
        for rank in range(3)
        for byte in read_shard(files, rank, 3, held_out=held_out).tolist()
    ]
    assert sorted(read) == list(range(256))
