"""Files of the user are replaced completely or not at all. Only regular files are accepted."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtrain.diagnostics import UsageError
from dtrain_cli.commands.report import report
from dtrain_cli.files import HTML, read_text, writable, write_text
from support.other_users import MALLORY, give, scratch

NOBODY = 65534


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "é cluster.yaml"


@pytest.mark.parametrize(
    "data", [b"", b"\xef\xbb\xbfa\r\nb\r", b"\xff\xfe bad \x80", "é\n".encode()]
)
def test_bytes_are_read_back_unchanged(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    text = read_text(path)
    assert text is not None
    write_text(path, text)
    assert path.read_bytes() == data
    assert [*path.parent.iterdir()] == [path]


@pytest.mark.parametrize(("public", "mode"), [(False, 0o640), (True, 0o644)])
def test_a_new_file_has_the_default_mode(path: Path, public: bool, mode: int) -> None:
    assert read_text(path) is None
    mask = os.umask(0o027)
    try:
        write_text(path, "a: 1\n", public=public)
    finally:
        os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert read_text(path) == "a: 1\n"


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o755])
def test_mode_and_owner_are_kept(path: Path, mode: int) -> None:
    path.write_text("old")
    path.chmod(mode)
    if os.geteuid() == 0:
        os.chown(path, NOBODY, NOBODY)
    before = path.stat()
    write_text(path, "new")
    after = path.stat()
    assert path.read_text() == "new"
    assert (after.st_mode, after.st_uid, after.st_gid) == (
        before.st_mode,
        before.st_uid,
        before.st_gid,
    )
    assert after.st_ino != before.st_ino


def test_readers_of_the_old_file_keep_it(path: Path) -> None:
    path.write_text("old")
    with path.open() as file:
        write_text(path, "new")
        assert file.read() == "old"


def test_a_file_of_another_kind_is_not_replaced(path: Path) -> None:
    assert not writable(path, HTML)
    path.write_text("")
    assert writable(path, HTML)
    path.write_text("<!DOCTYPE html>…")
    assert writable(path, HTML)
    path.write_text("cluster: {}\n")
    assert writable(path)
    with pytest.raises(UsageError, match="was not written by dtrain"):
        writable(path, HTML)


def test_a_page_is_refused_before_its_run_is_read(path: Path) -> None:
    path.write_text("cluster: {}\n")
    with pytest.raises(UsageError, match="was not written by dtrain"):
        report("no-such-run", html=path)


def test_a_link_still_points_to_the_file(path: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    target = tmp_path / "real" / "file.yaml"
    target.write_text("old")
    path.symlink_to("real/file.yaml")
    assert read_text(path) == "old"
    write_text(path, "new")
    assert path.is_symlink()
    assert target.read_text() == "new"
    assert [*target.parent.iterdir()] == [target]


def refused(path: Path, match: str) -> None:
    """Both functions refuse the file, and leave no temporary files."""
    for attempt in (lambda: read_text(path), lambda: write_text(path, "x")):
        with pytest.raises(UsageError, match=match) as caught:
            attempt()
        assert repr(str(path)) in caught.value.message
        assert not [*path.parent.glob(".dtrain-*")]


def test_a_broken_link(path: Path) -> None:
    path.symlink_to("gone.yaml")
    refused(path, r"is a link to .*gone.yaml', which does not exist")
    path.unlink()
    path.symlink_to(path.name)
    refused(path, "cannot be written|is a link")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as other users")
@pytest.mark.parametrize("kind", ["link", "file"])
def test_what_another_user_has_put_into_a_shared_folder(tmp_path: Path, kind: str) -> None:
    mine = tmp_path / "page.html"
    mine.write_text("<!doctype html>mine")
    path = scratch(tmp_path / "scratch") / "page.html"
    path.symlink_to(mine) if kind == "link" else path.touch()
    give(path, MALLORY)
    for attempt in (lambda: writable(path, HTML), lambda: write_text(path, "x")):
        with pytest.raises(UsageError, match="belongs to bin, in a folder that all users share"):
            attempt()
    assert mine.read_text() == "<!doctype html>mine"
    path.unlink()
    path.symlink_to(mine)
    write_text(path, "my own link")
    assert mine.read_text() == "my own link"


def test_a_folder(path: Path) -> None:
    path.mkdir()
    refused(path, "is a folder")
    refused(Path("-"), "would be a file of this name")  # standard output elsewhere


def test_a_missing_folder(path: Path) -> None:
    refused(path / "x.yaml", "no such folder")


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/null")])
def test_pipes_and_devices(path: Path, make: object) -> None:
    make(path)  # type: ignore[operator]
    refused(path, "not a plain file")


def test_invalid_names(tmp_path: Path) -> None:
    for path in (tmp_path / ("x" * 300), tmp_path / "a\0b"):
        with pytest.raises(UsageError, match="cannot be written"):
            write_text(path, "x")
    assert [*tmp_path.iterdir()] == []


@pytest.fixture
def as_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Work in the folder without the rights of root."""
    monkeypatch.chdir(tmp_path)
    user = os.geteuid()
    if user == 0:
        os.seteuid(NOBODY)
    yield
    os.seteuid(user)


@pytest.fixture
def protected_file(path: Path) -> Path:
    path.write_text("old")
    path.chmod(0o444)
    path.parent.chmod(0o777)
    return Path(path.name)


@pytest.fixture
def protected_folder(path: Path) -> Iterator[Path]:
    path.write_text("old")
    path.chmod(0o666)
    path.parent.chmod(0o555)
    yield Path(path.name)
    path.parent.chmod(0o755)


def test_a_protected_file(protected_file: Path, as_nobody: None) -> None:
    refused(protected_file, "is read-only")
    assert protected_file.read_text() == "old"


def test_a_protected_folder(protected_folder: Path, as_nobody: None) -> None:
    with pytest.raises(UsageError, match="cannot be written: permission denied") as caught:
        write_text(protected_folder, "x")
    assert "folder" in caught.value.hint
    assert protected_folder.read_text() == "old"
    with pytest.raises(UsageError, match="cannot be written: its folder is read-only") as caught:
        writable(protected_folder)
    assert "folder" in caught.value.hint


def test_whether_there_is_a_file_to_replace(path: Path) -> None:
    assert not writable(path)
    path.write_text("old")
    assert writable(path)
    assert path.read_text() == "old"
