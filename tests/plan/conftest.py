"""Fixtures that run `dtrain plan` as a process."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.json_page import undocumented
from support.launching import completed

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def dtrain(tmp_path: Path) -> Run:
    """Run `dtrain` in an empty folder, without a terminal."""

    def run(*argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
        alone = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", **environment}
        return completed(*argv, environment=alone, folder=tmp_path)

    return run


@pytest.fixture
def plan(dtrain: Run) -> Callable[..., dict[str, Any]]:
    """The object of `dtrain plan --json`."""

    def run(*argv: str) -> dict[str, Any]:
        done = dtrain("plan", *argv, "--json")
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        found: dict[str, Any] = json.loads(done.stdout)
        assert undocumented(found) == set()
        return found

    return run


@pytest.fixture
def shown(dtrain: Run) -> Callable[..., str]:
    """The output of `dtrain plan` as one line, so that tests can search across line breaks."""

    def run(*argv: str) -> str:
        done = dtrain("plan", *argv)
        assert done.returncode == 0, done.stderr
        return " ".join(done.stdout.split())

    return run
