"""WORKDIR, and the folder beside it that holds its snapshots."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import stat
import time

from dtrain.node.agent.wire import encode, raw
from dtrain.node.descriptors import closing_fd
from dtrain.node.sync.errors import SyncRefusedError
from dtrain.node.sync.manifest import Manifest
from dtrain.node.sync.snapshots import Snapshot
from dtrain.node.trust import Trust, UnsafeError, printable, user_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Iterator


NAME = re.compile(rb"(\d+)-[0-9a-f]{12}")
"""The name of a snapshot."""


class SnapshotStore:
    """WORKDIR and the folder beside it that holds its snapshots. The latter becomes the working
    directory of this process. Raises SyncRefusedError, UnsafeError and OSError."""

    def __init__(self, workdir: str, trust: Trust) -> None:
        path = os.path.expanduser(raw(workdir))
        if path.startswith(b"~"):
            raise SyncRefusedError(
                "%s: there is no such user here" % workdir, "write the whole path"
            )
        path = os.path.normpath(os.path.join(os.path.expanduser(b"~"), path))
        self._trust = trust
        self._name = os.path.basename(path)
        self.workdir = path
        if not self._name:
            raise self._occupied("is the root of the file system")
        created: list[bytes] = []
        # The folder above WORKDIR may be sticky, like /tmp; the folder of the snapshots may not.
        self._fd, self.container = trust.open_folder(
            path + b".dtrain", own=1, created=created, private=False
        )
        os.fchdir(self._fd)
        self.workdir = self.container[: -len(b".dtrain")]
        self._parent = os.open(b"..", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        if trust.shares(os.fstat(self._fd)):
            os.umask(0o007)
        try:
            self.check()
        except SyncRefusedError:
            for folder in reversed(created):
                with contextlib.suppress(OSError):
                    os.rmdir(folder)
            raise

    def check(self) -> bytes | None:
        """The name of the current snapshot, if any. Raises SyncRefusedError if WORKDIR is not
        ours to replace."""
        try:
            status = os.stat(self._name, dir_fd=self._parent, follow_symlinks=False)
        except FileNotFoundError:
            return None
        if not self._trust.trusts(status.st_uid):
            raise self._occupied("belongs to %s" % user_of(status.st_uid))
        if stat.S_ISLNK(status.st_mode):
            folder, name = os.path.split(os.readlink(self._name, dir_fd=self._parent))
            if folder != os.path.basename(self.container) or not NAME.fullmatch(name):
                raise self._occupied("is a link that dtrain did not make")
            return name
        if not stat.S_ISDIR(status.st_mode):
            raise self._occupied("is a file")
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        with closing_fd(os.open(self._name, flags, dir_fd=self._parent)) as fd:
            if os.listdir(fd):
                raise self._occupied("is a folder with files that dtrain did not put there")
        return None

    def check_moved(self) -> None:
        """Raises SyncRefusedError if the snapshots are no longer at their path."""
        with closing_fd(self._trust.open_folder(self.container, own=1)[0]) as fd:
            same = os.path.samestat(os.fstat(fd), os.fstat(self._fd))
        if not same:
            raise SyncRefusedError(
                "%s was moved while files were being sent" % printable(self.container),
                "launch again",
            )

    def _occupied(self, what: str) -> SyncRefusedError:
        return SyncRefusedError(
            "%s %s" % (printable(self.workdir), what),
            "choose another job.workdir, which dtrain makes, or move this one away",
        )

    def read_json(self, name: bytes) -> dict[str, Any] | None:
        """The JSON object in a file. None if there is no such file, or it contains anything
        else."""
        try:
            fd = self._trust.open_file(name, os.O_RDONLY, self._fd, self.container)
            with open(fd, "rb") as file:
                body = json.load(file)
        except UnsafeError:
            raise
        except (OSError, ValueError, RecursionError):
            return None
        return body if isinstance(body, dict) else None

    def read_manifest(self, name: bytes) -> Manifest | None:
        """The manifest of a snapshot. None if it is missing or damaged, as a job may damage it."""
        body = self.read_json(name + b".json")
        try:
            return None if body is None else Manifest(body)
        except (
            SyncRefusedError,
            LookupError,
            TypeError,
            ValueError,
            ArithmeticError,
            AttributeError,
        ):
            return None

    def write_json(self, name: bytes, body: dict[str, Any]) -> None:
        draft = name + b".new"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(draft)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        fd = self._trust.open_file(draft, flags, self._fd, self.container, 0o660)
        with open(fd, "wb") as file:
            file.write(encode(body))
        os.replace(draft, name)

    @contextlib.contextmanager
    def locked(self, patience: float) -> Iterator[StoreLock]:
        """Hold the lock.

        Raises SyncRefusedError if its holder makes no progress for ``patience`` seconds.
        """
        flags = os.O_RDWR | os.O_CREAT
        fd = self._trust.open_file(b"lock", flags, self._fd, self.container, 0o660)
        with open(fd, "r+b", buffering=0) as file:
            since, seen = time.monotonic(), os.fstat(file.fileno()).st_mtime_ns
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    pass
                except OSError as error:
                    raise SyncRefusedError(
                        "%s: files cannot be locked there (%s)"
                        % (printable(self.container), error.strerror),
                        "choose a job.workdir on another file system",
                    ) from None
                time.sleep(0.05)
                beat = os.fstat(file.fileno()).st_mtime_ns
                if beat != seen:
                    since, seen = time.monotonic(), beat
                elif time.monotonic() - since > patience:
                    file.seek(0)
                    holder = file.read(200).decode("utf-8", "replace").strip()
                    raise SyncRefusedError(
                        "another launch holds %s/lock and has not moved for %d s (%s)"
                        % (printable(self.container), patience, holder or "holder unknown"),
                        "wait for it or end that process, then launch again",
                    )
            file.truncate(0)
            file.write(("process %d on %s" % (os.getpid(), os.uname().nodename)).encode())
            yield StoreLock(file)

    def sweep(self) -> None:
        """Remove the leftovers of killed syncs. Under the lock, none of them is in use."""
        for name in os.listdir(b"."):
            if name.startswith((b".incoming-", b".trash-", b".link-")):
                if os.path.isdir(name) and not os.path.islink(name):
                    shutil.rmtree(name, ignore_errors=True)
                else:
                    os.unlink(name)

    def snapshots(self, current: bytes | None) -> list[Snapshot]:
        """All known snapshots, oldest first."""
        found = []
        for name in os.listdir(b"."):
            if NAME.fullmatch(name):
                self._trust.check_folder(os.path.join(self.container, name), own=1)
                tree = self.read_manifest(name)
                if tree is None:
                    if name != current:
                        continue  # Its outputs are unknown: leave it alone.
                    tree = Manifest({"digest": "", "folders": [], "links": [], "files": []})
                found.append(Snapshot(self, name, tree))
        return sorted(found, key=lambda snapshot: snapshot.number)

    def next_number(self) -> int:
        """One above the highest number of all snapshots, known or not."""
        names = map(NAME.fullmatch, os.listdir(b"."))
        return 1 + max((int(name[1]) for name in names if name), default=0)

    def temporary(self, kind: str) -> bytes:
        """A new private folder inside the container."""
        name = b".%s-%s" % (raw(kind), raw(os.urandom(8).hex()))
        os.mkdir(name, 0o770)
        return name

    def switch(self, snapshot: Snapshot) -> None:
        """Point WORKDIR at ``snapshot``, atomically."""
        link = b".link-%d" % os.getpid()
        os.symlink(os.path.join(os.path.basename(self.container), snapshot.name), link)
        if self.check() is None:
            with contextlib.suppress(FileNotFoundError):
                os.rmdir(self._name, dir_fd=self._parent)
        os.replace(link, self._name, dst_dir_fd=self._parent)


class StoreLock:
    """The lock while it is held. `beat` shows waiting syncs that there is progress."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._last = 0.0

    def beat(self) -> None:
        if time.monotonic() - self._last > 1:
            self._last = time.monotonic()
            os.utime(self._file.fileno())
