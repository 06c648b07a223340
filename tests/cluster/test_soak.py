"""Repeated runs of the fault tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).resolve().parents[2] / "scripts" / "soak"


def soak(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SOAK), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.netns
def test_each_case_is_counted() -> None:
    done = soak("2", "-k", "test_stop_force_after_stop")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 of 2 failed: test_commands::test_stop_force_after_stop" in done.stdout


def test_no_such_case() -> None:
    done = soak("2", "-k", "no_case_is_called_this")
    assert done.returncode == 1
    assert done.stdout == "no case has that name\n"
