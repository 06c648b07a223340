"""The rule for folders: whatever another user can change or replace is refused."""

from __future__ import annotations

import errno
import itertools
import os
import random
import shutil
import stat
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dtrain.node.trust import Trust, UnsafeError
from support.other_users import MALLORY, VICTIM, acting_as, folder_of, give

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as other users")

NOBODYS_GROUP = 54321
ROOT = 0


@pytest.fixture
def land() -> Iterator[Path]:
    """A folder that every user can enter, unlike pytest's."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def make(path: Path, uid: int, gid: int, mode: int) -> Path:
    path.mkdir()
    os.chown(path, uid, gid)
    path.chmod(mode)
    return path


def open_as_victim(path: Path, *groups: int, group: str | None = None, own: int = 0) -> bytes:
    """The path that `Trust.open_folder` finds."""
    with acting_as(VICTIM, *groups):
        fd, found = Trust(group).open_folder(os.fsencode(path), own=own)
        os.close(fd)
    return found


ME, MINE, THEM, THEIRS = VICTIM.pw_uid, VICTIM.pw_gid, MALLORY.pw_uid, MALLORY.pw_gid


@pytest.mark.parametrize(
    ("uid", "gid", "mode", "above", "final"),
    [
        (ME, MINE, 0o700, True, True),
        (ME, MINE, 0o775, True, True),
        (ROOT, 0, 0o755, True, True),
        (ROOT, 0, 0o711, True, True),
        (ROOT, MINE, 0o775, True, True),
        (ROOT, 0, 0o1777, True, False),
        (ROOT, THEIRS, 0o1775, True, False),
        (ME, THEIRS, 0o755, True, True),
        (ME, THEIRS, 0o775, False, False),
        (ROOT, THEIRS, 0o775, False, False),
        (ME, NOBODYS_GROUP, 0o775, False, False),
        (ME, MINE, 0o757, False, False),
        (ROOT, 0, 0o777, False, False),
        (THEM, THEIRS, 0o755, False, False),
        (THEM, THEIRS, 0o1777, False, False),
    ],
)
def test_owners_and_modes(
    land: Path, uid: int, gid: int, mode: int, above: bool, final: bool
) -> None:
    folder = make(land / "folder", uid, gid, mode)
    make(folder / "below", ME, MINE, 0o700)
    for path, allowed in ((folder / "below", above), (folder, final)):
        if allowed:
            assert open_as_victim(path) == os.fsencode(path)
        else:
            with pytest.raises(UnsafeError, match=f"mode {mode:04o}") as caught:
                open_as_victim(path)
            assert str(folder) in caught.value.reason


def test_whatever_another_user_can_do_is_refused(land: Path) -> None:
    """No rule is written down here: another user tries."""
    draw = random.Random(10)
    refused = changed = 0
    for number in range(300):
        path, chain = land / str(number), []
        for name in ("", "a", "b"):
            path = path / name
            uid = draw.choice([ROOT, ME, ME, THEM] if name else [ROOT])
            gid = draw.choice([0, MINE, THEIRS])
            mode = draw.choice([0o755, 0o755, 0o775, 0o777, 0o711]) | draw.choice([0, 0, 0o1000])
            chain.append(make(path, uid, gid, mode))
        with acting_as(MALLORY):
            attacked = can_change(chain)
        try:
            open_as_victim(path)
        except UnsafeError:
            refused += 1
        else:
            assert not attacked, [stat.filemode(one.stat().st_mode) for one in chain]
        changed += attacked
    assert changed > 50
    assert refused < 300


def can_change(chain: list[Path]) -> bool:
    """Whether this user can put something else at the end of a path."""

    def able(act: Callable[[], object]) -> bool:
        try:
            act()
        except PermissionError:
            return False
        return True

    for folder, below in itertools.pairwise(chain):
        aside = below.with_name("aside")
        if able(lambda below=below, aside=aside: below.rename(aside)):  # type: ignore[misc]
            aside.rename(below)
            return True
        if able(lambda folder=folder: folder.chmod(folder.stat().st_mode)):  # type: ignore[misc]
            return True
    if able(lambda: (chain[-1] / "planted.py").touch()):
        (chain[-1] / "planted.py").unlink()
        return True
    return able(lambda: chain[-1].chmod(chain[-1].stat().st_mode))


def test_symbolic_links(land: Path) -> None:
    mine = make(land / "mine", ME, MINE, 0o700)
    (mine / "data").mkdir()
    give(mine / "data", VICTIM)
    sticky = make(land / "sticky", ROOT, 0, 0o1777)
    theirs = folder_of(MALLORY, land / "theirs", 0o755)
    (land / "home").symlink_to("mine/../mine")
    (land / "loop").symlink_to("loop")
    (land / "elsewhere").symlink_to(theirs)
    for owner, name in ((VICTIM, "own"), (MALLORY, "planted")):
        (sticky / name).symlink_to(mine)
        give(sticky / name, owner)
    give(land / "home", MALLORY)  # only root can replace it
    assert open_as_victim(land / "home" / "data") == os.fsencode(mine / "data")
    assert open_as_victim(sticky / "own") == os.fsencode(mine)
    with pytest.raises(UnsafeError, match="planted is a symbolic link that belongs to bin"):
        open_as_victim(sticky / "planted" / "data")
    with pytest.raises(UnsafeError, match="theirs belongs to bin"):
        open_as_victim(land / "elsewhere")
    with pytest.raises(UnsafeError, match="is a symbolic link"):
        open_as_victim(land / "home", own=1)
    with pytest.raises(OSError) as caught:
        open_as_victim(land / "loop")
    assert caught.value.errno == errno.ELOOP


def test_folders_are_made_for_their_owner_alone(land: Path) -> None:
    sticky = make(land / "sticky", ROOT, 0, 0o1777)
    path, made = os.fsencode(sticky / "a" / "b"), []
    before = os.umask(0)
    try:
        with acting_as(VICTIM):
            fd, _ = Trust().open_folder(path, created=made)
    finally:
        os.umask(before)
    os.close(fd)
    assert made == [os.fsencode(sticky / "a"), path]
    for one in made:
        status = os.stat(one)
        assert (status.st_uid, stat.S_IMODE(status.st_mode)) == (ME, 0o700)


def test_a_folder_that_another_launch_removes_is_made_again(land: Path) -> None:
    """A launch that is undone removes the folders above its own if they are empty."""

    class Raced(Trust):
        removed = False

        def check(self, fd: int, path: bytes, *, above: bool = False) -> None:
            super().check(fd, path, above=above)
            if path.endswith(b"nodes") and not self.removed:
                self.removed = True
                os.rmdir(path)

    path = land / "nodes" / "run" / "node0"
    path.parent.parent.mkdir()
    created: list[bytes] = []
    fd, found = Raced().open_folder(os.fsencode(path), created=created)
    os.close(fd)
    assert found == os.fsencode(path)
    assert path.is_dir()
    assert created == [os.fsencode(one) for one in (path.parent.parent, path.parent, path)]


def test_a_rename_after_the_check_changes_nothing(land: Path) -> None:
    make(land / "a", ME, MINE, 0o700)
    with acting_as(VICTIM):
        fd, where = Trust().open_folder(os.fsencode(land / "a"))
    (land / "a").rename(land / "moved")
    folder_of(MALLORY, land / "a")
    with acting_as(VICTIM):
        os.close(Trust().open_file(b"file", os.O_WRONLY | os.O_CREAT, fd, where))
    os.close(fd)
    assert (land / "moved" / "file").exists()
    assert not (land / "a" / "file").exists()


def test_nobody_is_told_to_close_a_folder_for_all_users(land: Path) -> None:
    make(land / "tmp", ROOT, ROOT, 0o1777)
    with pytest.raises(UnsafeError, match="every user can write to it") as caught:
        open_as_victim(land / "tmp", ROOT)
    assert caught.value.hint("job.workdir") == "choose another job.workdir"


def test_a_trusted_group(land: Path) -> None:
    """Its members may own folders and write to them; others still may not."""
    team = make(land / "team", ROOT, THEIRS, 0o2775)
    make(team / "theirs", THEM, THEIRS, 0o775)
    make(team / "open", THEM, THEIRS, 0o777)
    make(team / "left", 54321, THEIRS, 0o775)
    with pytest.raises(UnsafeError, match="group bin") as caught:
        open_as_victim(team, THEIRS)
    assert "`cluster.trust_group: bin`" in caught.value.hint("job.workdir")
    assert f"chmod g-w,o-w {team}" in caught.value.hint("job.workdir")
    assert open_as_victim(team / "theirs", THEIRS, group="bin")
    with pytest.raises(UnsafeError, match="every user"):
        open_as_victim(team / "open", THEIRS, group="bin")
    with pytest.raises(UnsafeError, match="belongs to user 54321, not to you, root or bin"):
        open_as_victim(team / "left", THEIRS, group="bin")  # a member no more
    with pytest.raises(UnsafeError, match="does not belong to"):
        open_as_victim(team, group="bin")
    with pytest.raises(UnsafeError, match="is not a group"):
        open_as_victim(team, group="no-such-group")


USER, GROUP_OBJ, GROUP, MASK, OTHER = 2, 4, 8, 16, 32


def set_access_list(path: Path, *entries: tuple[int, int, int]) -> None:
    """``entries``: kind, permissions, and the user or group id (-1 where there is none)."""
    every = sorted([(1, 7, -1), *entries, (OTHER, 5, -1)])
    packed = b"".join(struct.pack("<HHi", *entry) for entry in every)
    try:
        os.setxattr(path, "system.posix_acl_access", struct.pack("<I", 2) + packed)
    except OSError:
        pytest.skip("this file system has no access lists")


@pytest.mark.parametrize(
    ("entries", "group", "stranger"),
    [
        ([(USER, 7, THEM), (GROUP_OBJ, 5, -1), (MASK, 7, -1)], None, "bin, by an access"),
        ([(USER, 2, 54321), (GROUP_OBJ, 5, -1), (MASK, 7, -1)], "bin", "user 54321, by an access"),
        ([(GROUP_OBJ, 5, -1), (GROUP, 7, NOBODYS_GROUP), (MASK, 7, -1)], "bin", "group 54321"),
        ([(GROUP_OBJ, 5, -1), (GROUP, 7, THEIRS), (MASK, 7, -1)], None, "group bin"),
        ([(GROUP_OBJ, 5, -1), (GROUP, 7, THEIRS), (MASK, 7, -1)], "bin", None),
        ([(USER, 7, THEM), (GROUP_OBJ, 7, -1), (MASK, 7, -1)], "bin", None),
        ([(USER, 7, ME), (USER, 7, ROOT), (GROUP_OBJ, 7, -1), (MASK, 7, -1)], None, None),
        ([(USER, 5, THEM), (GROUP_OBJ, 5, -1), (MASK, 7, -1)], None, None),
        ([(USER, 7, THEM), (GROUP_OBJ, 7, -1), (MASK, 5, -1)], None, None),
    ],
)
def test_access_lists(
    land: Path, entries: list[tuple[int, int, int]], group: str | None, stranger: str | None
) -> None:
    folder = make(land / "folder", ME, MINE, 0o700)
    set_access_list(folder, *entries)
    if stranger is None:
        open_as_victim(folder, THEIRS, group=group)
    else:
        with pytest.raises(UnsafeError, match=stranger):
            open_as_victim(folder, THEIRS, group=group)


def test_an_access_list_is_read_from_the_open_file(land: Path) -> None:
    """Another file that takes the name at the same time has no effect."""
    folder = make(land / "folder", ME, MINE, 0o700)
    set_access_list(folder, (USER, 7, THEM), (GROUP_OBJ, 5, -1), (MASK, 7, -1))
    fd = os.open(folder, os.O_PATH)
    folder.rename(land / "moved")
    make(folder, ME, MINE, 0o700)
    try:
        with acting_as(VICTIM), pytest.raises(UnsafeError, match="bin, by an access"):
            Trust().check(fd, os.fsencode(folder))
    finally:
        os.close(fd)


@pytest.mark.parametrize("what", ["fifo", "link", "folder", "writable", "theirs", "two names"])
def test_control_files(land: Path, what: str) -> None:
    folder = make(land / "folder", ME, MINE, 0o700)
    file, other = folder / "file", folder / "other"
    give_to = MALLORY if what == "theirs" else VICTIM
    other.write_text("precious")
    give(other, VICTIM)
    match what:
        case "fifo":
            os.mkfifo(file)
        case "link":
            file.symlink_to(other)
        case "folder":
            file.mkdir()
        case "two names":
            file.hardlink_to(other)
        case _:
            file.touch()
    give(file, give_to, 0o666 if what == "writable" else None)
    with acting_as(VICTIM):
        trust = Trust()
        fd, where = trust.open_folder(os.fsencode(folder))
        for flags in (os.O_RDONLY, os.O_RDWR | os.O_CREAT):
            if what != "two names" or flags:
                with pytest.raises(OSError, match="file") as caught:
                    trust.open_file(b"file", flags, fd, where)
                assert caught.value.filename == os.fsencode(file)
        os.close(fd)
    assert other.read_text() == "precious"


def test_scripts(land: Path) -> None:
    folder = make(land / "folder", ME, MINE, 0o755)
    theirs = folder_of(MALLORY, land / "theirs", 0o755)
    for path, user, mode in (
        (folder / "good.py", VICTIM, 0o644),
        (folder / "open.py", VICTIM, 0o666),
        (folder / "theirs.py", MALLORY, 0o644),
        (theirs / "mine.py", VICTIM, 0o644),
    ):
        path.touch()
        give(path, user, mode)
    (folder / "link.py").symlink_to("good.py")
    (folder / "away.py").symlink_to(theirs / "mine.py")
    with acting_as(VICTIM):
        for name in ("good.py", "link.py"):
            Trust().check_script(os.fsencode(folder / name))
        for name in ("open.py", "theirs.py", "away.py"):
            with pytest.raises(UnsafeError):
                Trust().check_script(os.fsencode(folder / name))
