"""Every command that takes a run takes the same one for the name of a job, and says which."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from support.launching import completed
from support.stored import make_run

OLDER, LATEST = "train-20261125-100000-00000a", "train-20261125-110000-00000b"


@pytest.fixture
def older(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Two runs of a job, of which the older one is not over."""
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    make_run(LATEST)
    folder = make_run(OLDER)
    begin, _, _ = folder.journal.read_bytes().rstrip().rpartition(b"\n")
    folder.journal.write_bytes(begin + b"\n")
    return OLDER


def dtrain(*argv: str) -> subprocess.CompletedProcess[str]:
    return completed(*argv, environment=os.environ)


@pytest.mark.parametrize("verb", ["report", "logs", "ps"])
def test_the_one_that_is_not_over(older: str, verb: str) -> None:
    options = ["--json"] if verb == "ps" else []
    shown = dtrain(verb, "train", *options)
    assert shown.returncode == 0, shown.stderr
    assert older in shown.stdout + shown.stderr
    assert LATEST not in shown.stdout + shown.stderr


def test_logs_names_the_run_on_stderr_unless_it_was_named(older: str) -> None:
    by_job, by_name = dtrain("logs", "train"), dtrain("logs", older)
    assert by_job.stderr == f"dtrain: output of run {older}\n" + by_name.stderr
    assert by_name.stderr == "dtrain: output of attempt 2\n"
    assert by_job.stdout == by_name.stdout
