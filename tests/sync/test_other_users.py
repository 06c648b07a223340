"""Another user of the node prepares the folders that a sync uses, and gets nothing by it."""

from __future__ import annotations

import contextlib
import os
import pwd
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtrain.diagnostics import PrepareError
from dtrain.sync import Patience, send
from dtrain.transport.contract import RemoteProcess
from support.other_users import MALLORY, VICTIM, folder_of, give, scratch
from support.synced import Folders

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as other users")


@pytest.fixture
def shared(folders: Folders, tmp_path: Path) -> Folders:
    """A workdir in a folder that every user can write to."""
    folders.workdir = scratch(tmp_path / "scratch") / "proj"
    folders.write({"train.py": "print('mine')"})
    return folders


def refused(folders: Folders, *words: str) -> str:
    with pytest.raises(PrepareError) as caught:
        folders.sync()
    for word in words:
        assert word in caught.value.reason
    assert caught.value.hint
    return caught.value.hint


def test_a_sync_below_a_sticky_folder(shared: Folders) -> None:
    shared.sync()
    assert (shared.workdir / "train.py").read_text() == "print('mine')"
    assert shared.container.stat().st_mode & 0o7777 == 0o700


def test_a_container_that_another_user_made(shared: Folders) -> None:
    folder_of(MALLORY, shared.container)
    hint = refused(shared, str(shared.container), "belongs to bin", "mode 0777")
    assert "job.workdir" in hint
    assert list(shared.container.iterdir()) == []


def test_a_container_that_every_user_can_write_to(shared: Folders) -> None:
    shared.sync()
    shared.container.chmod(0o777)
    assert f"chmod g-w,o-w {shared.container}" in refused(shared, "every user", "mode 0777")


def test_a_container_that_is_a_link(shared: Folders, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    shared.container.symlink_to(tmp_path / "elsewhere")
    refused(shared, "is a symbolic link")
    give(shared.container, MALLORY)
    refused(shared, "is a symbolic link that belongs to bin")
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("what", ["link", "right link", "folder", "file", "fifo"])
def test_a_workdir_that_another_user_made(shared: Folders, what: str) -> None:
    match what:
        case "link":
            shared.workdir.symlink_to("/etc")
        case "right link":
            shared.sync()
            target = shared.workdir.readlink()
            shared.workdir.unlink()
            shared.workdir.symlink_to(target)
        case "folder":
            shared.workdir.mkdir()
        case "file":
            shared.workdir.touch()
        case "fifo":
            os.mkfifo(shared.workdir)
    give(shared.workdir, MALLORY)
    refused(shared, str(shared.workdir), "belongs to bin")
    assert shared.workdir.lstat().st_uid == MALLORY.pw_uid


def test_a_parent_that_its_group_can_write_to(folders: Folders, tmp_path: Path) -> None:
    parent = folder_of(MALLORY, tmp_path / "lab", 0o2775)
    os.chown(parent, 0, MALLORY.pw_gid)
    folders.workdir = parent / "proj"
    folders.write({"a": "1"})
    refused(folders, str(parent), "group bin", "mode 2775")
    assert list(parent.iterdir()) == []


@pytest.mark.parametrize("name", ["lock", "{}.json", "{}.state.json"])
@pytest.mark.parametrize("what", ["link", "fifo", "theirs", "writable"])
def test_a_control_file_that_is_not_ours(shared: Folders, name: str, what: str) -> None:
    shared.sync()
    (snapshot,) = shared.snapshots
    file = shared.container / name.format(snapshot)
    precious = shared.container.parent / "precious"
    precious.write_text("precious")
    match what:
        case "link":
            file.unlink()
            file.symlink_to(precious)
        case "fifo":
            file.unlink()
            os.mkfifo(file, 0o600)
        case "theirs":
            give(file, MALLORY)
        case "writable":
            file.chmod(0o666)
    refused(shared, str(file))
    assert precious.read_text() == "precious"


def test_a_lock_that_is_another_file_too(shared: Folders) -> None:
    shared.sync()
    precious = shared.container.parent / "precious"
    precious.write_text("precious")
    (shared.container / "lock").unlink()
    (shared.container / "lock").hardlink_to(precious)
    refused(shared, "hard link")
    assert precious.read_text() == "precious"


@pytest.mark.parametrize("what", ["link", "theirs", "writable"])
def test_a_snapshot_that_is_not_ours(shared: Folders, tmp_path: Path, what: str) -> None:
    shared.sync()
    snapshot = shared.container / shared.snapshots[0]
    match what:
        case "link":
            snapshot.rename(tmp_path / "aside")
            snapshot.symlink_to(folder_of(MALLORY, tmp_path / "evil"))
        case "theirs":
            give(snapshot, MALLORY)
        case "writable":
            snapshot.chmod(0o777)
    refused(shared, str(snapshot))


class Moving:
    """A real connection. Before the contents are sent, the folder around the workdir moves away,
    and another user's takes its place."""

    def __init__(self, folders: Folders) -> None:
        self._folders = folders
        self.moved = folders.workdir.parent.with_name("moved")

    def start(self, command: str) -> RemoteProcess:
        process = self._folders.connection.start(command)
        write = process.write

        def moving(data: bytes) -> None:
            if b"print('new')" in data:
                parent = self._folders.workdir.parent
                parent.rename(self.moved)
                folder_of(MALLORY, parent)
                folder_of(MALLORY, self._folders.container)
            write(data)

        process.write = moving  # type: ignore[method-assign]
        return process

    def close(self) -> None:
        pass


def test_a_parent_that_moves_away_during_the_sync(folders: Folders) -> None:
    folders.transport = "local"  # contents are not compressed
    folders.write({"train.py": "print('old')"})
    folders.sync()
    folders.write({"train.py": "print('new')"})
    connection = Moving(folders)
    with pytest.raises(PrepareError, match="belongs to bin"):
        send(connection, folders.host, folders.scan(), str(folders.workdir))
    assert list(folders.container.iterdir()) == []
    assert (connection.moved / "gpt" / "train.py").read_text() == "print('new')"


RACE = """
import contextlib, os, sys
evil, *names = sys.argv[1:]
steps = [
    lambda name: os.mkdir(name, 0o777),
    os.rmdir,
    lambda name: os.symlink(evil, name),
    os.unlink,
    lambda name: os.rename(name, name + ".aside"),
]
print("ready", flush=True)
while True:
    for step in steps:
        for name in names:
            with contextlib.suppress(OSError):
                step(name)
"""


def test_a_user_who_makes_the_same_folders_all_the_time(
    folders: Folders, reachable: Folders
) -> None:
    shared = scratch(reachable.workdir.parents[1] / "scratch")
    evil = folder_of(MALLORY, shared.parent / "evil")
    folders.workdir = shared / "proj"
    folders.write({"train.py": "print('mine')"})
    ids = [f"--reuid={MALLORY.pw_uid}", f"--regid={MALLORY.pw_gid}", "--clear-groups"]
    attack = subprocess.Popen(
        [
            "setpriv",
            *ids,
            "/usr/bin/python3",
            "-uc",
            RACE,
            evil,
            folders.workdir,
            folders.container,
        ],
        stdout=subprocess.PIPE,
    )
    assert attack.stdout is not None
    try:
        attack.stdout.readline()
        for _ in range(10):
            try:
                folders.sync()
            except PrepareError as error:
                assert error.hint
            else:
                assert (folders.workdir / "train.py").read_text() == "print('mine')"
            for name in (folders.workdir, folders.container):
                with contextlib.suppress(OSError):
                    if name.lstat().st_uid == 0:
                        name.unlink() if name.is_symlink() else shutil.rmtree(name)
    finally:
        attack.kill()
        attack.communicate()
    assert list(evil.iterdir()) == []


LAB = 54322


class Member:
    """Syncs a folder as one user of a node, who is also in the group `lab` there."""

    def __init__(self, folders: Folders, user: pwd.struct_passwd, python: Path) -> None:
        self._folders = folders
        groups = python.with_name("groups")
        members = f"lab:x:{LAB}:{VICTIM.pw_name},{MALLORY.pw_name}\n"
        groups.write_text(Path("/etc/group").read_text() + members)
        groups.chmod(0o644)
        python.write_text(
            "#!/bin/sh\n"
            'exec unshare -m sh -c \'mount --bind "$0" /etc/group && exec "$@"\''
            f" {shlex.quote(str(groups))} setpriv --reuid={user.pw_uid} --regid={user.pw_gid}"
            f' --groups={LAB} /usr/bin/python3 "$@"\n'
        )
        python.chmod(0o755)
        self._python = str(python)

    def sync(self, content: str, group: str | None = "lab") -> list[str]:
        folders = self._folders
        folders.write({"train.py": content, "sub/more.py": content})
        folders.python = self._python
        send(
            folders.connection,
            folders.host,
            folders.scan(),
            str(folders.workdir),
            trust_group=group,
            patience=Patience(lock=20, unused=0),
        )
        assert (folders.workdir / "train.py").read_text() == content
        return folders.snapshots


@pytest.fixture
def reachable(folders: Folders) -> Iterator[Folders]:
    """A workdir in a folder of the group `lab`, which its members can reach."""
    land = Path(tempfile.mkdtemp())
    land.chmod(0o755)
    team = folder_of(MALLORY, land / "team")
    os.chown(team, 0, LAB)
    team.chmod(0o2770)
    folders.workdir = team / "proj"
    yield folders
    shutil.rmtree(land)


@pytest.mark.netns
@pytest.mark.skipif(not Path("/usr/bin/python3").exists(), reason="users need a Python")
def test_a_team_shares_a_workdir(reachable: Folders, tmp_path: Path) -> None:
    one = Member(reachable, VICTIM, tmp_path / "one")
    two = Member(reachable, MALLORY, tmp_path / "two")
    with pytest.raises(PrepareError, match="group lab"):
        one.sync("1", group=None)
    one.sync("1")
    first = reachable.snapshots
    two.sync("2")
    assert one.sync("3") != first
    assert reachable.snapshots[0] not in first  # another member's sync deleted it
    assert reachable.container.stat().st_mode & 0o7777 == 0o2770
