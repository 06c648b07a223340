"""Disks that are full, and folders that turn read-only, on a host or on the launching machine."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.disks import disk, fill, mount
from support.faults import Field
from support.limits import HANG

pytestmark = pytest.mark.netns
Make = Callable[..., Field]


# The kernel refuses it while a file is open to be written, as each append opens one.
REMOUNT = ("sh", "-c", 'until mount -o remount,ro,bind "$0"; do sleep 0.01; done')


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    mount("--bind", str(folder), str(folder))
    try:
        subprocess.run([*REMOUNT, str(folder)], check=True, timeout=HANG)
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_host_whose_disk_is_full(field: Make) -> None:
    """Its worker cannot write, and cannot store its error message either."""
    scene = field(disk="40M")
    launch = scene.start(scene.file())
    fill(scene.cluster["node2"].home)
    done = scene.over(launch, 1)
    assert "rank 1 on node2 exited with status 1: No space left on device: the disk" in done.stderr
    assert "hint: a disk was full on that host" in done.stderr
    scene.check(whole=False)


def test_a_disk_here_that_is_full_from_the_start(field: Make) -> None:
    scene = field()
    with disk(scene.launcher.home, "1M"):
        fill(scene.launcher.home)
        done = scene.over(scene.command("launch", str(scene.file())), 3)
        assert "cannot store the run's files: No space left on device" in done.stderr
        scene.until_nothing_is_left()


def test_a_full_disk_here(field: Make) -> None:
    """The job stops. Once there is space again, all its output can be fetched."""
    scene = field()
    with disk(scene.launcher.home, "256M"):
        launch = scene.start(scene.file())
        ballast = fill(scene.launcher.home)
        done = scene.over(launch, 3)
        assert "cannot store the run's files: No space left on device" in done.stderr
        scene.until_nothing_is_left()
        ballast.unlink()
        done = scene.over(scene.command("attach", scene.run.name), 1)
        assert "stopped the job: this machine cannot store the run's files" in done.stderr
        scene.check(whole=False)


def test_a_full_disk_here_while_attaching(field: Make) -> None:
    scene = field()
    with disk(scene.launcher.home, "256M"):
        run = scene.detach(scene.file())
        scene.kill_launcher()
        ballast = fill(scene.launcher.home)
        done = scene.over(scene.command("attach", run), 3)
        assert "cannot store the run's files: No space left on device" in done.stderr
        scene.until_nothing_is_left()
        ballast.unlink()
        scene.over(scene.command("attach", scene.run.name), 1)
        scene.check(whole=False)


def test_a_run_folder_there_that_turns_read_only(field: Make) -> None:
    """Open files stay writable."""
    scene = field()
    launch = scene.start(scene.file())
    node = scene.cluster["node2"]
    (folder,) = (node.home / ".dtrain" / "nodes").glob("test-*")
    node.run("mount", "--bind", str(folder), str(folder))
    node.run(*REMOUNT, str(folder), timeout=HANG)
    scene.advance()
    scene.stop()
    scene.over(launch, 0)
    scene.check()


def test_a_run_folder_here_that_turns_read_only(field: Make) -> None:
    scene = field()
    launch = scene.start(scene.file())
    with read_only(scene.run):
        done = scene.over(launch, 3)
        assert "cannot store the run's files: Read-only file system" in done.stderr
        scene.until_nothing_is_left()
    scene.over(scene.command("attach", scene.run.name), 1)
    scene.check(whole=False)
