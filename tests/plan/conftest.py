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
        assert done.stderr == ""
        found: dict[str, Any] = json.loads(done.stdout)
        if "layouts" in found:
            fits = any(one["fits"] for one in found["layouts"])
            assert done.returncode == (0 if fits else 1)
        assert undocumented(found) == set()
        return found

    return run


@pytest.fixture
def shown(dtrain: Run) -> Callable[..., str]:
    """The output of `dtrain plan` as one line, so that tests can search across line breaks."""

    def run(*argv: str) -> str:
        done = dtrain("plan", *argv)
        # 1: no layout fits.
        assert done.returncode in (0, 1), done.stderr
        return " ".join(done.stdout.split())

    return run
