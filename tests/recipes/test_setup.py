"""The setup scripts explain what a machine lacks."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from support.limits import HANG

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the checkout without a virtual environment."""
    folder = tmp_path / "a checkout"
    ignore = shutil.ignore_patterns(".venv", ".git", ".*_cache", "__pycache__", ".hypothesis")
    shutil.copytree(ROOT, folder, ignore=ignore)
    return folder


def demo(checkout: Path, *prefix: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*prefix, str(checkout / "scripts" / "demo"), "--dry-run"],
        capture_output=True,
        text=True,
        # No index, wheel folder or configuration of this machine.
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(checkout),
            "PIP_CONFIG_FILE": os.devnull,
            **env,
        },
        timeout=HANG,
        check=False,
    )


def test_an_unusable_python_is_named(checkout: Path) -> None:
    done = demo(checkout, PYTHON="/no/such/python")
    assert done.returncode == 1
    assert done.stderr.startswith("error: dtrain needs Python 3.10 or newer; found /no/such/python")
    assert "hint: " in done.stderr


@pytest.mark.netns
def test_a_missing_network_is_reported_as_such(checkout: Path) -> None:
    done = demo(checkout, "unshare", "--net", PIP_RETRIES="0")
    assert done.returncode == 1
    assert "error: packages could not be downloaded\nhint: is this machine online?" in done.stderr
    assert not list((checkout / ".venv").glob(".dtrain-*"))
