"""Git repositories."""

from __future__ import annotations

import subprocess
from pathlib import Path


def git(folder: Path, *words: str) -> str:
    """What a command of Git prints."""
    author = ["-c", "user.name=ml", "-c", "user.email=ml@example.org"]
    command = ["git", "-C", str(folder), *author, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def committed(folder: Path) -> str:
    """Make ``folder`` a repository of what is in it. Returns the commit."""
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "--allow-empty", "-m", "first")
    return git(folder, "rev-parse", "HEAD")
