"""What jobs write beside the sent files goes with them from snapshot to snapshot."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.synced import Folders, contents, write


def test_outputs_are_shown_by_the_next_snapshot(folders: Folders) -> None:
    folders.write({"train.py": "1", "lib/a.py": "1"})
    old = Path(folders.sync().tree_path)
    write(old / "out/step-1.pt", "weights")
    write(old / "lib/cache.json", "{}")
    (old / "out/latest").symlink_to("step-1.pt")
    (old / "out/absolute").symlink_to(old / "out/step-1.pt")
    (old / "empty").mkdir()
    write(old / "lib/__pycache__/a.pyc", "compiled")
    folders.write({"train.py": "2"})
    new = Path(folders.sync().tree_path)
    assert new != old
    assert contents(new) == {
        b"train.py": b"2",
        b"lib": None,
        b"lib/a.py": b"1",
        b"lib/cache.json": b"{}",
        b"out": None,
        b"out/step-1.pt": b"weights",
        b"out/latest": "step-1.pt",
        b"out/absolute": "step-1.pt",
        b"empty": None,
    }
    # A checkpoint is too big to copy, and a log goes on in both.
    assert (new / "out/step-1.pt").samefile(old / "out/step-1.pt")


def test_outputs_survive_their_snapshot(folders: Folders) -> None:
    folders.write({"a": "1"})
    old = Path(folders.sync(unused=-1).tree_path)
    write(folders.workdir / "out/1.pt", "weights")
    (folders.workdir / "out/latest").symlink_to(old / "out/1.pt")
    folders.write({"a": "2"})
    folders.sync(unused=-1)
    assert not old.exists()
    assert len(folders.snapshots) == 1
    assert (folders.workdir / "out/latest").read_text() == "weights"
    assert sorted(path.name for path in folders.container.iterdir()) == [
        folders.snapshots[0],
        f"{folders.snapshots[0]}.json",
        f"{folders.snapshots[0]}.state.json",
        "lock",
    ]


def test_a_sent_file_wins_and_the_output_stays(folders: Folders) -> None:
    folders.write({"a": "1"})
    old = Path(folders.sync(unused=-1).tree_path)
    write(old / "config.json", "by the job")
    write(old / "out", "a file of the job")
    write(old / "logs/today", "a folder of the job")
    folders.write({"config.json": "sent", "out/x": "sent", "logs": "sent"})
    result = folders.sync(unused=-1)
    assert contents(folders.workdir) == contents(folders.source)
    assert (old / "config.json").read_text() == "by the job"
    assert (old / "out").read_text() == "a file of the job"
    assert (old / "logs/today").read_text() == "a folder of the job"
    (notice,) = result.notices
    assert all(str(old / name) in notice for name in ("config.json", "out", "logs/today"))
    # The notice appears once, and the file stays.
    folders.write({"a": "2"})
    assert folders.sync(unused=-1).notices == ()
    assert (old / "config.json").exists()
    # Once its name is free, the output shows again, and the old snapshot can go.
    for name in ("config.json", "out/x", "logs"):
        (folders.source / name).unlink()
    (folders.source / "out").rmdir()
    folders.sync(unused=-1)
    assert contents(folders.workdir) == {
        b"a": b"2",
        b"config.json": b"by the job",
        b"out": b"a file of the job",
        b"logs": None,
        b"logs/today": b"a folder of the job",
    }
    assert not old.exists()


def test_an_edited_file_that_is_not_sent_any_more_is_an_output(folders: Folders) -> None:
    folders.write({"log.txt": "", "gone.txt": "", "a": "1"})
    folders.sync()
    (folders.workdir / "log.txt").write_text("by the job")
    (folders.source / "log.txt").unlink()
    (folders.source / "gone.txt").unlink()
    folders.sync()
    assert contents(folders.workdir) == {b"a": b"1", b"log.txt": b"by the job"}


def test_late_outputs_of_an_older_snapshot_come_with_the_next_sync(folders: Folders) -> None:
    folders.write({"a": "1"})
    old = Path(folders.sync().tree_path)
    write(old / "log", "1")
    folders.write({"a": "2"})
    second = Path(folders.sync().tree_path)
    # The job of the first snapshot goes on.
    with open(old / "log", "a") as log:
        log.write("2")
    write(old / "step-2.pt", "weights")
    assert (second / "log").read_text() == "12"
    assert not (second / "step-2.pt").exists()
    third = Path(folders.sync().tree_path)
    assert (third / "step-2.pt").samefile(old / "step-2.pt")
    assert not (second / "step-2.pt").exists()
    assert folders.sync().tree_path == str(third)


def test_of_two_versions_the_later_is_shown(folders: Folders) -> None:
    folders.write({"a": "1"})
    old = Path(folders.sync().tree_path)
    write(old / "latest.pt", "step 1")
    folders.write({"a": "2"})
    folders.sync()
    _replace(old / "latest.pt", "step 2", at=2_000_000_000)
    third = Path(folders.sync().tree_path)
    assert (third / "latest.pt").read_text() == "step 2"
    _replace(third / "latest.pt", "step 3", at=2_000_000_002)
    _replace(old / "latest.pt", "a straggler", at=2_000_000_001)
    folders.write({"a": "4"})
    folders.sync(unused=-1)
    assert (folders.workdir / "latest.pt").read_text() == "step 3"
    # It was shown nowhere, so it is not deleted.
    assert (old / "latest.pt").read_text() == "a straggler"


def test_a_deleted_output_does_not_come_back_and_frees_its_space(folders: Folders) -> None:
    folders.write({"a": "1"})
    old = Path(folders.sync().tree_path)
    write(old / "out/1.pt", "weights")
    folders.write({"a": "2"})
    folders.sync()
    (folders.workdir / "out/1.pt").unlink()
    folders.write({"a": "3"})
    folders.sync()
    assert not (folders.workdir / "out/1.pt").exists()
    assert (old / "out/1.pt").exists()
    folders.sync(unused=-1)
    assert len(folders.snapshots) == 1


def test_a_new_file_under_the_name_and_inode_of_a_settled_one_is_not_lost(
    folders: Folders,
) -> None:
    folders.write({"a": "1"})
    old = Path(folders.sync().tree_path)
    write(old / "out.pt", "1")
    folders.write({"a": "2"})
    folders.sync()
    (folders.workdir / "out.pt").unlink()
    # Same inode, other time: as when a file system gives a freed inode out again.
    (old / "out.pt").write_text("2")
    folders.sync(unused=-1)
    assert (folders.workdir / "out.pt").read_text() == "2"


def test_folders_that_are_not_sent_any_more_go_unless_outputs_are_in_them(
    folders: Folders,
) -> None:
    folders.write({"plain/x": "", "used/x": "", "a": "1"})
    folders.sync()
    write(folders.workdir / "used/deep/out", "1")
    for name in ("plain", "used"):
        (folders.source / name / "x").unlink()
        (folders.source / name).rmdir()
    folders.sync()
    assert set(contents(folders.workdir)) == {b"a", b"used", b"used/deep", b"used/deep/out"}


def _replace(path: Path, content: str, *, at: int) -> None:
    """The way in which checkpoints are written, at a time in seconds."""
    fresh = path.with_suffix(".new")
    fresh.write_text(content)
    os.utime(fresh, (at, at))
    fresh.replace(path)


@pytest.mark.parametrize("suffix", [".json", ".state.json"])
@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "{}",
        '{"users": 1, "settled": [], "digest": "", "folders": 1, "links": [], "files": []}',
        '{"users": {"x": "y"}, "digest": "", "folders": [], "links": [], "files": [["a", 1e999]]}',
        '{"users": {"x": 1%s}, "digest": "", "folders": ["../.."], "links": [], "files": []}'
        % ("0" * 400),
    ],
    ids=["deep", "empty", "wrong types", "wrong values", "unsafe"],
)
def test_a_job_that_damages_what_is_noted_of_a_snapshot_blocks_no_sync(
    folders: Folders, suffix: str, text: str
) -> None:
    folders.write({"a": "1"})
    folders.sync(unused=-1)
    (folders.container / f"{folders.snapshots[0]}{suffix}").write_text(text)
    folders.write({"a": "2"})
    folders.sync(unused=-1)
    assert (folders.workdir / "a").read_text() == "2"
