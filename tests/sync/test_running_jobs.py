"""A job that runs in a snapshot is left alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.limits import HANG
from support.synced import Folders

# Reads every file repeatedly, and prints the result at the end.
READER = """
import os, sys
seen = set()
print("reading", flush=True)
while not os.path.exists(sys.argv[1]):
    for name in ("a.py", "b.py", "sub/c.py"):
        seen.add(open(name).read())
    seen.update(os.listdir("."))
print(*sorted(seen))
"""


def test_a_job_sees_nothing_of_an_update(folders: Folders, tmp_path: Path) -> None:
    names = ("a.py", "b.py", "sub/c.py")
    folders.write(dict.fromkeys(names, "0"))
    tree = folders.sync().tree_path
    enough = tmp_path / "enough"
    # It starts through the link: what counts is where that led at the time.
    with _process([sys.executable, "-c", READER, str(enough)], cwd=folders.workdir) as job:
        assert job.stdout
        assert job.stdout.readline() == "reading\n"
        for number in range(1, 6):
            folders.write(dict.fromkeys(names, str(number)) | {f"new-{number}.py": ""})
            folders.sync(unused=-1)
        enough.write_text("")
        assert job.stdout.read() == "0 a.py b.py sub\n"
        job.wait(timeout=HANG)
    assert (folders.workdir / "a.py").read_text() == "5"
    assert Path(tree).name in folders.snapshots
    folders.sync(unused=-1)
    assert Path(tree).name not in folders.snapshots


@pytest.mark.parametrize("how", ["cwd", "below", "environment", "argument"])
def test_a_snapshot_in_use_is_not_deleted(folders: Folders, how: str) -> None:
    folders.write({"a": "1", "sub/b": "1"})
    tree = Path(folders.sync(unused=-1).tree_path)
    cwd = {"cwd": tree, "below": tree / "sub"}.get(how)
    env = {"PYTHONPATH": f"/x:{tree}"} if how == "environment" else None
    argument = [str(tree / "a")] if how == "argument" else []
    with _process(["sh", "-c", "echo up; read x", "sh", *argument], cwd=cwd, env=env) as job:
        assert job.stdout
        assert job.stdout.readline() == "up\n"
        folders.write({"a": "2"})
        folders.sync(unused=-1)
        assert tree.name in folders.snapshots
    folders.sync(unused=-1)
    assert tree.name not in folders.snapshots


def test_a_snapshot_just_given_to_a_launch_is_not_deleted(folders: Folders) -> None:
    folders.write({"a": "1"})
    tree = Path(folders.sync().tree_path)
    folders.write({"a": "2"})
    folders.sync()
    assert (tree / "a").read_text() == "1"


def test_a_snapshot_given_to_another_machine_is_not_deleted(folders: Folders) -> None:
    """On a shared home folder: its processes cannot be seen from here."""
    folders.write({"a": "1"})
    tree = Path(folders.sync().tree_path)
    state = tree.with_name(tree.name + ".state.json")
    state.write_text('{"users": {"another machine": 0}, "settled": {}}')
    folders.write({"a": "2"})
    folders.sync(unused=-1)
    assert tree.exists()
    state.write_text('{"users": {}, "settled": {}}')
    folders.sync(unused=-1)
    assert not tree.exists()


@contextmanager
def _process(
    command: list[str], *, cwd: Path | None = None, env: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    job = subprocess.Popen(
        command, cwd=cwd, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield job
    finally:
        job.kill()
        job.communicate()
