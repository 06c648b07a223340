"""What is read of the working folder, and what is refused."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtrain.diagnostics import StoppedError, UsageError
from dtrain.sync import local_folder, scan, walk
from dtrain.sync import source as source_module
from support.other_users import VICTIM, acting_as, folder_of
from support.synced import Folders


def test_paths_kinds_and_exclusion(folders: Folders) -> None:
    folders.write({"train.py": "x", "data/big.bin": "y", "lib/a.py": "z", "lib/a.pyc": ""})
    (folders.source / "empty").mkdir()
    (folders.source / "now").symlink_to("lib/a.py")
    (folders.source / "run.sh").write_text("")
    (folders.source / "run.sh").chmod(0o755)
    folders.exclude = ["data/", "*.pyc"]
    tree = folders.scan()
    assert tree.folders == ("empty", "lib")
    assert tree.links == (("now", "lib/a.py"),)
    assert [(f.path, f.size, f.executable) for f in tree.files] == [
        ("lib/a.py", 1, False),
        ("run.sh", 0, True),
        ("train.py", 1, False),
    ]
    assert tree.size == 2
    assert tree.notices == ()


def test_the_digest_names_the_content(folders: Folders) -> None:
    folders.write({"a": "1", "b": "2"})
    first = folders.scan().digest
    os.utime(folders.source / "a", (1, 1))
    assert folders.scan().digest == first
    (folders.source / "a").chmod(0o755)
    program = folders.scan().digest
    (folders.source / "a").chmod(0o644)
    (folders.source / "c").mkdir()
    folder = folders.scan().digest
    (folders.source / "c").rmdir()
    folders.write({"a": "2", "b": "1"})
    assert len({first, program, folder, folders.scan().digest}) == 4


@pytest.mark.parametrize("target", ["/etc/hostname", "../secret", "lib/../../x", "up/../../.."])
def test_links_that_lead_outside_are_refused(folders: Folders, target: str) -> None:
    folders.write({"lib/a.py": ""})
    (folders.source / "fine").symlink_to("lib/../lib/a.py")
    (folders.source / "dangling").symlink_to("nowhere")
    (folders.source / "bad one").symlink_to(target)
    with pytest.raises(UsageError) as caught:
        folders.scan()
    assert f"bad one is a link to {target}, which leads outside" in caught.value.message
    assert "fine" not in caught.value.message
    assert "job.sync.exclude" in caught.value.hint
    folders.exclude = ["bad one"]
    assert {path for path, _ in folders.scan().links} == {"fine", "dangling"}


def test_a_link_that_leads_outside_by_way_of_another_is_refused(folders: Folders) -> None:
    folders.write({"deep/er/a.py": ""})
    (folders.source / "deep/er/up").symlink_to("../..")
    (folders.source / "deep/er/out").symlink_to("up/../x")
    with pytest.raises(UsageError, match="deep/er/out"):
        folders.scan()


def test_all_bad_paths_are_told_at_once_and_on_one_line(folders: Folders) -> None:
    for number in range(8):
        (folders.source / f"link\n{number}").symlink_to("/etc")
    with pytest.raises(UsageError) as caught:
        folders.scan()
    assert "and 3 more" in caught.value.message
    assert "\n" not in caught.value.message


def test_special_files_are_left_out_with_a_notice(folders: Folders) -> None:
    os.mkfifo(folders.source / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folders.source / "socket"))
        tree = folders.scan()
    assert tree.files == ()
    assert "pipe, socket" in tree.notices[0]


@pytest.mark.parametrize("name", ["nothing", "file", "~nobody-here/project"])
def test_no_such_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=name):
        scan(local_folder(name, tmp_path), [])


def test_a_stop_request_ends_the_reading_of_a_large_file(tmp_path: Path) -> None:
    with (tmp_path / "data.bin").open("wb") as file:
        file.truncate(32 << 30)
    polls = iter(range(5))
    with pytest.raises(StoppedError, match=f"stopped while reading {tmp_path}; nothing"):
        scan(tmp_path, (), lambda: next(polls) == 4)
    assert next(polls, None) is None


def test_files_that_disappear_during_the_walk_are_not_sent(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Editors and git make files for a moment, also while dtrain reads the folder."""
    folders.write({"train.py": "x", ".train.py.swp": "y"})
    (folders.source / "lock").symlink_to("train.py")
    scandir = os.scandir

    def slow(path: bytes) -> Iterator[os.DirEntry[bytes]]:
        entries = list(scandir(path))
        (folders.source / ".train.py.swp").unlink()
        (folders.source / "lock").unlink()
        return iter(entries)

    monkeypatch.setattr(walk.os, "scandir", slow)
    tree = folders.scan()
    assert ([file.path for file in tree.files], tree.links) == (["train.py"], ())


def test_files_that_disappear_after_their_folder_was_read_are_not_sent(folders: Folders) -> None:
    folders.write({"train.py": "x", "z.tmp": "y", "cache/a": "1"})
    removals = iter(
        [
            lambda: None,  # before the source is read
            lambda: shutil.rmtree(folders.source / "cache"),
            lambda: (folders.source / "z.tmp").unlink(),  # while train.py is read
        ]
    )
    tree = scan(folders.source, (), lambda: bool(next(removals)()))
    assert ([file.path for file in tree.files], tree.folders) == (["train.py"], ())


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as another user")
def test_a_folder_whose_files_cannot_be_examined_is_refused() -> None:
    with tempfile.TemporaryDirectory() as folder:
        listed = folder_of(VICTIM, Path(folder) / "listed")
        (listed / "train.py").write_text("x")
        (listed / "link").symlink_to("train.py")
        Path(folder).chmod(0o755)
        listed.chmod(0o600)
        with acting_as(VICTIM), pytest.raises(UsageError, match=r"link cannot be read \(Permis"):
            scan(listed, ())


def test_a_file_that_always_changes_is_refused(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders.write({"log.txt": "1"})
    read = os.fstat
    ticks = iter(range(1, 100))

    def fstat(fd: int) -> os.stat_result:
        os.utime(folders.source / "log.txt", (next(ticks), 0), follow_symlinks=False)
        os.utime(folders.source / "log.txt", ns=(0, next(ticks)))
        return read(fd)

    monkeypatch.setattr(source_module.os, "fstat", fstat)
    with pytest.raises(UsageError, match=r"log\.txt .* changes while it is read"):
        folders.scan()


def test_a_big_folder_gets_a_notice_and_a_huge_one_is_refused(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders.write({f"data/{n}": "" for n in range(9)} | {"train.py": ""})
    monkeypatch.setattr(walk, "MANY_FILES", 8)
    (notice,) = folders.scan().notices
    assert "data/ (0 B in 9 files)" in notice
    with open(folders.source / "model.pt", "wb") as sparse:
        sparse.truncate(100 << 30)
    with pytest.raises(UsageError) as caught:
        folders.scan()
    assert "model.pt (107 GB in 1 file)" in caught.value.message
    assert "job.sync.exclude" in caught.value.hint
