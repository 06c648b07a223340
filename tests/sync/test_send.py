"""What the node has after a sync."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from dtrain.diagnostics import PrepareError
from dtrain.spec.model import TransportName
from dtrain.sync import SyncResult, send
from support.synced import Folders, contents

HOSTILE = [
    "spaces and 'quotes\" $(reboot) ; echo `x`",
    "new\nline",
    "-rf",
    "~",
    "back\\slash",
    "\u00fcml\u00e4ut \u2603",
    "x" * 255,
    "\x01\x7f",
    os.fsdecode(b"not-utf8-\xff\xfe"),
]


@pytest.mark.parametrize("transport", ["ssh", "local"])
def test_the_node_shows_the_folder(folders: Folders, transport: TransportName) -> None:
    folders.transport = transport
    folders.write({"train.py": "print()", "lib/a.py": "", "deep/er/b": "x" * 3_000_000})
    (folders.source / "empty").mkdir()
    (folders.source / "link").symlink_to("deep/er")
    result = folders.sync()
    assert contents(folders.workdir) == contents(folders.source)
    # Empty files need no sending.
    assert (result.sent_files, result.sent_bytes, result.unchanged_files) == (2, 3_000_007, 1)
    assert result.tree_path == str(folders.workdir.resolve())
    assert Path(result.tree_path).parent == folders.container
    assert os.readlink(folders.workdir) == f"gpt.dtrain/{folders.snapshots[0]}"
    assert result.notices == ()


def test_modes_and_times(folders: Folders) -> None:
    folders.write({"run.sh": "#!/bin/sh", "read-only": "x", "sub/a": ""})
    (folders.source / "run.sh").chmod(0o755)
    (folders.source / "read-only").chmod(0o444)
    os.utime(folders.source / "run.sh", ns=(0, 1_234_567_890_123_456_789))
    root = Path(folders.sync().tree_path)
    modes = {
        str(path.relative_to(folders.container)): stat.S_IMODE(path.lstat().st_mode)
        for path in [folders.container, root, *root.rglob("*"), *folders.container.glob("*.json")]
    }
    name = root.name
    assert modes == {
        ".": 0o700,
        name: 0o700,
        f"{name}/sub": 0o700,
        f"{name}/sub/a": 0o600,
        f"{name}/run.sh": 0o700,
        f"{name}/read-only": 0o600,
        f"{name}.json": 0o600,
        f"{name}.state.json": 0o600,
    }
    assert (root / "run.sh").stat().st_mtime_ns == 1_234_567_890_123_456_789


def test_nothing_new_sends_nothing_and_makes_nothing(folders: Folders) -> None:
    folders.write({"a": "1", "b/c": "2"})
    first = folders.sync()
    os.utime(folders.source / "a", (1, 1))
    again = folders.sync()
    assert (again.sent_files, again.sent_bytes, again.unchanged_files) == (0, 0, 2)
    assert again.tree_path == first.tree_path
    assert len(folders.snapshots) == 1


def test_only_new_content_is_sent(folders: Folders) -> None:
    folders.write({"same": "1", "moved": "content", "edited": "2", "deleted": "3"})
    first = folders.sync()
    (folders.source / "moved").rename(folders.source / "elsewhere")
    (folders.source / "deleted").unlink()
    folders.write({"edited": "22", "new": "twin", "twin": "twin", "copy-of-same": "1"})
    second = folders.sync()
    assert second.sent_files == 2
    assert second.sent_bytes == len("22") + len("twin")
    assert contents(folders.workdir) == contents(folders.source)
    old = contents(Path(first.tree_path))
    assert old[b"edited"] == b"2"
    assert old[b"deleted"] == b"3"
    # A sent file edited in place in one snapshot must not change in another.
    assert all(path.stat().st_nlink == 1 for path in Path(second.tree_path).rglob("*"))


def test_what_somebody_edited_or_deleted_on_the_node_is_sent_again(folders: Folders) -> None:
    folders.write({"edited": "1", "same-size": "2", "deleted": "3", "touched": "4", "mode": "5"})
    folders.sync()
    node = folders.workdir.resolve()
    (node / "edited").write_text("edited")
    (node / "same-size").write_text("X")
    (node / "deleted").unlink()
    os.utime(node / "touched")
    (node / "mode").chmod(0o755)
    result = folders.sync()
    assert result.sent_files == 3
    assert contents(folders.workdir) == contents(folders.source)
    assert stat.S_IMODE((folders.workdir / "mode").stat().st_mode) == 0o600
    assert (node / "edited").read_text() == "edited"
    assert any(str(node / "edited") in notice for notice in result.notices)


def test_a_touched_file_is_not_news(folders: Folders) -> None:
    folders.write({"a": "1"})
    folders.sync()
    os.utime(folders.workdir / "a")
    assert folders.sync().sent_files == 0
    assert len(folders.snapshots) == 1


def test_kinds_change_places(folders: Folders) -> None:
    folders.write({"file-folder": "1", "folder-file/x": "2", "file-link": "3"})
    (folders.source / "link-file").symlink_to("file-link")
    folders.sync()
    for name in ("file-folder", "file-link", "link-file"):
        (folders.source / name).unlink()
    (folders.source / "folder-file/x").unlink()
    (folders.source / "folder-file").rmdir()
    folders.write({"file-folder/x": "1", "folder-file": "2", "link-file": "4"})
    (folders.source / "file-link").symlink_to("link-file")
    folders.sync()
    assert contents(folders.workdir) == contents(folders.source)


def test_hostile_names(folders: Folders) -> None:
    for name in HOSTILE:
        (folders.source / name).mkdir()
        (folders.source / name / name).write_text(name, errors="surrogateescape")
        (folders.source / f"l{name}"[:255]).symlink_to(name)
    folders.sync()
    assert contents(folders.workdir) == contents(folders.source)
    assert folders.sync().sent_files == 0


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_workdir(folders: Folders, name: str) -> None:
    folders.workdir = folders.workdir.with_name(name[:240])
    folders.write({"a": "1"})
    assert folders.sync().tree_path == os.fspath(folders.workdir.resolve())
    assert contents(folders.workdir) == contents(folders.source)


@pytest.mark.parametrize("locale", ["C", "POSIX", "en_US.ISO-8859-1"])
def test_names_are_exact_in_any_locale(
    folders: Folders, monkeypatch: pytest.MonkeyPatch, locale: str
) -> None:
    monkeypatch.setenv("LC_ALL", locale)
    folders.write({"\u00fcml\u00e4ut/\u2603": "1"})
    folders.sync()
    assert contents(folders.workdir) == contents(folders.source)


def test_workdir_from_the_home_folder(
    folders: Folders, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    folders.write({"a": "1"})
    for workdir in ("~/runs/a", "runs/b/"):
        result = send(folders.connection, folders.host, folders.scan(), workdir)
        assert result.tree_path.startswith(str(tmp_path / "home/runs"))
    assert (tmp_path / "home/runs/b/a").read_text() == "1"


def test_an_empty_folder_gives_way(folders: Folders) -> None:
    folders.write({"a": "1"})
    folders.workdir.mkdir(parents=True)
    folders.sync()
    assert contents(folders.workdir) == contents(folders.source)


def test_what_dtrain_did_not_make_is_left_alone(folders: Folders, tmp_path: Path) -> None:
    folders.write({"a": "1"})
    folders.workdir.parent.mkdir()
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("")

    folders.workdir.symlink_to(other)
    refusal = _refusal(folders)
    assert refusal.reason == f"{folders.workdir} is a link that dtrain did not make"
    assert "job.workdir" in refusal.hint
    folders.workdir.unlink()

    folders.workdir.write_text("")
    assert _refusal(folders).reason == f"{folders.workdir} is a file"
    folders.workdir.unlink()

    other.rename(folders.workdir)
    assert "is a folder with files that dtrain did not put there" in _refusal(folders).reason
    assert (folders.workdir / "thesis.tex").exists()


def test_a_workdir_inside_the_sent_folder_is_refused_on_this_machine(folders: Folders) -> None:
    folders.transport = "local"
    folders.workdir = folders.source / "out"
    assert "is inside the folder to send" in _refusal(folders).reason


def test_no_folder_can_be_made(folders: Folders, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    folders.workdir = tmp_path / "file" / "gpt"
    refusal = _refusal(folders)
    assert str(tmp_path / "file") in refusal.reason
    assert refusal.host == "gpu01"
    assert refusal.attempted == "sending the working folder"


def test_no_python(folders: Folders) -> None:
    folders.python = "/nowhere/python3"
    refusal = _refusal(folders)
    assert "/nowhere/python3" in refusal.reason
    assert "cluster.python" in refusal.hint


def _refusal(folders: Folders) -> PrepareError:
    with pytest.raises(PrepareError) as caught:
        folders.sync()
    return caught.value


@pytest.mark.parametrize(
    ("sent", "size", "known", "words"),
    [
        (1, 150, 0, "sent 1 file (150 B) to node0"),
        (2, 250_000, 1, "sent 2 files (250 kB) to node0; 1 was up to date"),
        (12, 2_000, 30, "sent 12 files (2 kB) to node0; 30 were up to date"),
    ],
)
def test_the_summary_counts_files(sent: int, size: int, known: int, words: str) -> None:
    assert SyncResult(sent, size, known, "/there").summary("node0") == words
