"""Disks that are full."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True)


@contextmanager
def disk(folder: Path, size: str) -> Iterator[None]:
    """A file system of ``size`` at ``folder``, for this test."""
    folder.mkdir(exist_ok=True)
    mount("-t", "tmpfs", "-o", f"size={size}", "dtrain-test", str(folder))
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Fill the disk. Returns the file to remove to free the space."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(1 << 16)):
                pass
        except OSError:
            return ballast
    raise AssertionError("nothing was ever full")
