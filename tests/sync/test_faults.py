"""A failed transfer leaves the node unchanged and is reported in one message."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from dtrain.diagnostics import ConnectError, PrepareError
from dtrain.sync import Tree, scan, send
from dtrain.transport.contract import Connection, RemoteProcess
from dtrain.transport.local import LocalConnection
from support.synced import Folders, contents

BIG = 8 << 20


class Faulty:
    """A real connection on which something happens before the write with number ``when``."""

    def __init__(self, real: LocalConnection, when: int, what: Callable[[], None]) -> None:
        self._real = real
        self._when = when
        self._what = what

    def start(self, command: str) -> RemoteProcess:
        process = self._real.start(command)
        write, numbers = process.write, iter(range(1000))

        def faulty(data: bytes) -> None:
            if next(numbers) == self._when:
                self._what()
            write(data)

        process.write = faulty  # type: ignore[method-assign]
        return process

    def close(self) -> None:
        self._real.close()


@pytest.fixture
def incompressible(folders: Folders) -> Folders:
    """A folder that is sent in several writes, after an earlier state of it."""
    folders.write({"a": "1"})
    folders.sync()
    (folders.workdir / "out.pt").write_text("weights")
    for number in range(4):
        (folders.source / f"big-{number}").write_bytes(os.urandom(BIG // 4))
    folders.write({"a": "2"})
    return folders


def test_a_killed_receiver(incompressible: Folders, tmp_path: Path) -> None:
    folders = incompressible
    python, pid = tmp_path / "python", tmp_path / "pid"
    python.write_text(f'#!/bin/sh\necho $$ > {pid}\nexec {folders.python} "$@"\n')
    python.chmod(0o755)
    folders.python = str(python)

    def kill() -> None:
        os.kill(int(pid.read_text()), signal.SIGKILL)

    before = contents(folders.workdir)
    with pytest.raises(PrepareError, match="killed by SIGKILL"):
        _send(Faulty(folders.connection, 4, kill), folders, folders.scan())
    assert contents(folders.workdir) == before
    assert list(folders.container.glob(".incoming-*"))
    folders.sync()
    assert not list(folders.container.glob(".*"))
    assert contents(folders.workdir) == contents(folders.source) | {b"out.pt": b"weights"}


def test_a_broken_connection(incompressible: Folders) -> None:
    folders = incompressible
    before = contents(folders.workdir)

    def drop() -> None:
        raise ConnectError("gpu01", "writing", "connection reset by peer")

    with pytest.raises(ConnectError):
        _send(Faulty(folders.connection, 4, drop), folders, folders.scan())
    assert contents(folders.workdir) == before
    # The receiver sees the end of its stdin, cleans up and lets the lock go.
    folders.sync()
    assert not list(folders.container.glob(".*"))
    assert contents(folders.workdir) == contents(folders.source) | {b"out.pt": b"weights"}


@pytest.mark.parametrize("how", ["longer", "shorter", "other", "deleted", "folder"])
@pytest.mark.parametrize("size", [10, BIG])
def test_a_file_that_changes_after_the_scan(folders: Folders, how: str, size: int) -> None:
    folders.write({"a": "1"})
    folders.sync()
    before = contents(folders.workdir)
    changing = folders.source / "changing"
    content = os.urandom(size)
    changing.write_bytes(content)
    tree = folders.scan()
    changing.unlink()
    if how == "folder":
        changing.mkdir()
    elif how != "deleted":
        changing.write_bytes(
            {"longer": b"x" + content, "shorter": content[1:], "other": content[::-1]}[how]
        )
    with pytest.raises(PrepareError, match=r"changing in .* changed during the transfer") as c:
        folders.sync(tree)
    assert "launch again" in c.value.hint
    assert contents(folders.workdir) == before


def test_a_log_that_only_grows_is_sent_as_it_was_at_the_scan(folders: Folders) -> None:
    folders.write({"log": "1"})
    tree = folders.scan()
    folders.write({"log": "12"})
    folders.sync(tree)
    assert (folders.workdir / "log").read_text() == "1"


def test_a_lock_that_stays_held(folders: Folders) -> None:
    folders.write({"a": "1"})
    folders.sync()
    folders.write({"a": "2"})
    with open(folders.container / "lock", "r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(b"process 7 on gpu02")
        lock.flush()
        with pytest.raises(PrepareError) as caught:
            folders.sync(lock=0.2)
    assert "process 7 on gpu02" in caught.value.reason
    assert (folders.workdir / "a").read_text() == "1"
    folders.sync()


@pytest.mark.parametrize(
    ("options", "files", "why"),
    [
        ("size=1m", {"big": BIG}, "needed"),  # Seen before anything is received.
        ("size=1m", {f"small-{n}": 1 for n in range(400)}, "0.0 MiB free"),  # On the way.
        ("size=1m,nr_inodes=100", {f"small-{n}": 1 for n in range(200)}, "no inode free"),
    ],
)
def test_a_full_disk(
    folders: Folders, tmp_path: Path, options: str, files: dict[str, int], why: str
) -> None:
    """The node's disk is a small tmpfs in a mount namespace of its own."""
    disk, left = tmp_path / "disk", tmp_path / "left"
    disk.mkdir()
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\n"
        f"exec unshare -Urm sh -c 'mount -t tmpfs -o {options} none {disk} && "
        f'{folders.python} "$@"; status=$?; ls -A {disk}/gpt.dtrain > {left}; exit $status\' '
        'sh "$@"\n'
    )
    python.chmod(0o755)
    probe = subprocess.run(["unshare", "-Urm", "true"], capture_output=True, text=True, check=False)
    assert probe.returncode == 0, f"this test needs user namespaces: {probe.stderr}"
    folders.python = str(python)
    folders.workdir = disk / "gpt"
    for name, size in files.items():
        (folders.source / name).write_bytes(os.urandom(size))
    with pytest.raises(PrepareError) as caught:
        folders.sync()
    assert f"no space left in {disk}" in caught.value.reason
    assert why in caught.value.reason
    assert "free some there" in caught.value.hint
    assert left.read_text() == "lock\n"


def test_a_login_shell_that_prints(folders: Folders, tmp_path: Path) -> None:
    folders.write({"a": "1"})
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho Welcome; exec {folders.python} "$@"\n')
    python.chmod(0o755)
    folders.python = str(python)
    folders.sync()
    python.write_text("#!/bin/sh\necho your account has expired; exit 3\n")
    with pytest.raises(PrepareError, match=r"status 3: your account has expired"):
        folders.sync()


@pytest.mark.parametrize("path", ["/etc/x", "../x", "a/../../x", "a//b", "./x", "", "a\0b", "no/x"])
def test_the_node_takes_no_path_that_leads_elsewhere(folders: Folders, path: str) -> None:
    folders.write({"a": "1"})
    tree = scan(folders.source, [])
    hostile = type(tree)(
        source=tree.source,
        folders=("a",) if path.startswith("a") else (),
        links=((path, "x"),),
        files=(),
        digest="0" * 64,
        contents=tree.contents,
    )
    with pytest.raises(PrepareError, match="unsafe path"):
        folders.sync(hostile)
    assert not folders.workdir.exists()


def _send(connection: Connection, folders: Folders, tree: Tree) -> None:
    send(connection, folders.host, tree, str(folders.workdir))
