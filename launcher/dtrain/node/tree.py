"""Receives the working folder on a node. Runs on its Python 3.8+ with the standard library alone.

The folder that the cluster file names, WORKDIR, becomes a symbolic link to a snapshot:

    WORKDIR -> WORKDIR.dtrain/7-3f2a90c1b7d4
    WORKDIR.dtrain/lock                        flock'ed by the one sync that is under way
    WORKDIR.dtrain/7-3f2a90c1b7d4/             files as sent, and what jobs wrote beside them
    WORKDIR.dtrain/7-3f2a90c1b7d4.json         the manifest: what was sent, never changed
    WORKDIR.dtrain/7-3f2a90c1b7d4.state.json   who was given it; which outputs went on from it
    WORKDIR.dtrain/.incoming-*                 being received; left over if the sync was killed

A snapshot gets no update, ever: a new state of the folder is a new snapshot, and the link changes
to it in one step. A job that runs in the old one sees nothing of that.

Whatever in a snapshot is not as it was sent is an **output**: somebody on the node wrote it. New
snapshots show the outputs of all older ones at the same place, as hard links: checkpoints are too
big to copy, and a log that a job still writes is the same file in both. Sent files never are hard
links: a job that edits one in place would edit it in all snapshots.

An output that a new snapshot cannot show (a sent file has its name, or a later version of it) stays
where it is, and so does its snapshot. Every output that a newer snapshot has once shown is
**settled** there: it needs its old name no more, and whoever deletes the new name means it.

Snapshots are deleted when no process uses them and all their outputs are settled. A home folder
may be shared, and the processes of other machines cannot be seen: so each machine that was given a
snapshot is noted, gives it up in a later sync of its own, and the last one deletes it.

The receiver opens WORKDIR.dtrain once and makes it its own working directory. From then on all
paths are relative to it, so a rename of a folder above changes nothing. Folders that another user
can change are refused (see `trust`). With a trusted group, members share a workdir that lies in a
folder of the group: what a sync makes there, all of them can read, replace and delete.

All paths are bytes here, relative to a snapshot unless they are called `root`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import stat
import sys
import time
import zlib
from typing import Any, BinaryIO, Iterable, Iterator

from dtrain.node.sync.wire import (
    CHUNK,
    DEFLATED,
    FRAME,
    LENGTH,
    PREAMBLE,
    RAW,
    REQUEST,
)
from dtrain.node.trust import Trust, UnsafeError, printable, user_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dtrain.node.importer import Importer

MAX_REQUEST = 1 << 30
IDLE = 300
"""Seconds of silence from the launcher after which it is taken for dead, so that the lock frees."""
REHASHED = 64 << 20
"""A touched file of at most so many bytes is compared by content before it counts as edited."""
NAME = re.compile(rb"(\d+)-[0-9a-f]{12}")
SHOWN = 5


class RefusedError(Exception):
    """The sync cannot be done; the reason and the hint are for the user."""

    def __init__(self, reason: str, hint: str = "", **more: Any) -> None:
        super().__init__(reason)
        self.reply = dict({"type": "refused", "reason": reason, "hint": hint}, **more)


class GoneError(Exception):
    """The launcher is not there any more, or has given up."""


# -- what comes over the wire ---------------------------------------------------------------------


class Channel:
    """The launcher's frames on stdin, answers as length and JSON on stdout."""

    def __init__(self, source: BinaryIO, sink: BinaryIO) -> None:
        self._source = source
        self._sink = sink

    def greet(self) -> None:
        self._sink.write(PREAMBLE)
        self._sink.flush()

    def answer(self, body: dict[str, Any]) -> None:
        text = json.dumps(body).encode()
        self._sink.write(LENGTH.pack(len(text)) + text)
        self._sink.flush()

    def request(self) -> dict[str, Any]:
        kind, payload = self._frame(MAX_REQUEST)
        if kind != REQUEST:
            raise GoneError
        request: dict[str, Any] = json.loads(zlib.decompress(payload))
        return request

    def content(self) -> bytes:
        """The next piece of the contents asked for."""
        kind, payload = self._frame(2 * CHUNK)
        if kind == DEFLATED:
            return zlib.decompressobj().decompress(payload, CHUNK)
        if kind == RAW:
            return payload
        raise GoneError

    def _frame(self, limit: int) -> tuple[int, bytes]:
        signal.alarm(IDLE)
        kind, length = FRAME.unpack(self._exactly(FRAME.size))
        if length > limit:
            raise GoneError
        payload = self._exactly(length)
        signal.alarm(0)
        return kind, payload

    def _exactly(self, size: int) -> bytes:
        data = self._source.read(size)
        if len(data) < size:
            raise GoneError
        return data


class Sent:
    """One file of the launcher's tree."""

    __slots__ = ("executable", "mode", "mtime_ns", "path", "sha256", "size")

    def __init__(self, row: list[Any]) -> None:
        self.path = raw(row[0])
        self.size = int(row[1])
        self.executable = bool(row[2])
        self.sha256 = str(row[3])
        self.mtime_ns = int(row[4])
        # In a manifest on the node: what its file system has made of the mode.
        self.mode = int(row[5]) if len(row) > 5 else None

    def row(self) -> list[Any]:
        content = [text(self.path), self.size, self.executable, self.sha256]
        return [*content, self.mtime_ns, self.mode]


class Tree:
    """What is to be here: a checked manifest. Raises RefusedError for paths that lead elsewhere."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.digest = str(body["digest"])
        self.folders = [raw(path) for path in body["folders"]]
        self.links = {raw(path): raw(target) for path, target in body["links"]}
        self.files = [Sent(row) for row in body["files"]]
        self.by_path = {file.path: file for file in self.files}
        self._check()

    def manifest(self) -> dict[str, Any]:
        return {
            "digest": self.digest,
            "folders": [text(path) for path in self.folders],
            "links": [[text(path), text(target)] for path, target in self.links.items()],
            "files": [file.row() for file in self.files],
        }

    def _check(self) -> None:
        known: set[bytes] = {b""}
        names = [*self.folders, *self.links, *(file.path for file in self.files)]
        for at, path in enumerate(names):
            safe = all(part not in (b"", b".", b"..") for part in path.split(b"/"))
            # Each parent is a folder of the tree, so nothing is ever written through a link.
            if not safe or b"\0" in path or path in known or os.path.dirname(path) not in known:
                raise RefusedError("the launcher sent an unsafe path: %r" % path)
            if at < len(self.folders):
                known.add(path)
        if len(set(names)) != len(names):
            raise RefusedError("the launcher sent a path twice")
        for path, target in self.links.items():
            lexical = os.path.normpath(os.path.join(os.path.dirname(path), target))
            if target.startswith(b"/") or lexical == b".." or lexical.startswith(b"../"):
                raise RefusedError("the launcher sent a link that leads outside: %r" % path)


def raw(text: str) -> bytes:
    """The bytes of a path. Explicit, because the node's locale may be anything."""
    return text.encode("utf-8", "surrogateescape")


def text(path: bytes) -> str:
    return path.decode("utf-8", "surrogateescape")


# -- snapshots ------------------------------------------------------------------------------------


class Output:
    """Something in a snapshot that was not sent, or is not as it was sent."""

    def __init__(self, snapshot: Snapshot, path: bytes, status: os.stat_result) -> None:
        self.snapshot = snapshot
        self.path = path
        self.mtime_ns = status.st_mtime_ns
        self.target: bytes | None = None
        if stat.S_ISLNK(status.st_mode):
            target = os.readlink(self.where)
            if target.startswith(snapshot.path + b"/"):
                # `latest -> /home/me/gpt.dtrain/7-…/step-100` must outlive its snapshot.
                folder = os.path.dirname(os.path.join(snapshot.path, path))
                target = os.path.relpath(target, folder)
            self.target = target
        self.mark = [text(self.target)] if self.target is not None else [status.st_ino]
        """Equal marks at one path in two snapshots: the same output."""

    @property
    def where(self) -> bytes:
        return os.path.join(self.snapshot.root, self.path)

    @property
    def signature(self) -> list[Any]:
        """Tells it from a later file at its place, which may get the inode of a deleted one."""
        return [*self.mark, self.mtime_ns]

    @property
    def settled(self) -> bool:
        return bool(self.snapshot.settled.get(text(self.path)) == self.signature)

    def show(self, root: bytes) -> None:
        """Make it appear in the snapshot at ``root``."""
        there = os.path.join(root, self.path)
        if self.target is None:
            os.link(self.where, there, follow_symlinks=False)
        else:
            os.symlink(self.target, there)


class Snapshot:
    def __init__(self, place: Place, name: bytes, tree: Tree) -> None:
        self.name = self.root = name
        self.path = os.path.join(place.container, name)
        self.number = int(name.split(b"-")[0])
        self.tree = tree
        self._place = place
        self._state_file = name + b".state.json"
        state = place.read_json(self._state_file) or {}
        users, settled = state.get("users"), state.get("settled")
        self.users: dict[str, float] = {}
        if isinstance(users, dict):
            self.users = {who: t if isinstance(t, float) else 0.0 for who, t in users.items()}
        self.settled: dict[str, list[Any]] = settled if isinstance(settled, dict) else {}
        self.outputs: list[Output] = []
        self.folders: dict[bytes, int] = {}
        self.contents: dict[str, tuple[bytes, tuple[int, int]]] = {}
        """By hash: a file that still is as sent, and the signature that says so."""
        self.pristine = False
        """Whether all that was sent is there, unchanged."""

    def examine(self) -> None:
        """See what is as it was sent, and what is an output."""
        self.outputs, self.folders, self.contents = [], {}, {}
        missing = len(self.tree.files) + len(self.tree.links)
        for path, status in walk(self.root):
            compiled = b"__pycache__" in path.split(b"/")
            if stat.S_ISDIR(status.st_mode):
                if not compiled or path in self.tree.folders:
                    self.folders[path] = stat.S_IMODE(status.st_mode)
                continue
            sent = self.tree.by_path.get(path)
            if sent is not None and self._as_sent(sent, status):
                self.contents[sent.sha256] = (path, signature(status))
                missing -= sent.mode == stat.S_IMODE(status.st_mode)
                continue
            output = Output(self, path, status)
            if output.target is not None and self.tree.links.get(path) == output.target:
                missing -= 1
            elif not compiled:
                self.outputs.append(output)
        self.pristine = not missing and self.folders.keys() >= set(self.tree.folders)

    def _as_sent(self, sent: Sent, status: os.stat_result) -> bool:
        if not stat.S_ISREG(status.st_mode) or status.st_size != sent.size:
            return False
        if status.st_mtime_ns == sent.mtime_ns:
            return True
        # Touched, or moved here by a backup: no reason to send it again.
        try:
            return sent.size <= REHASHED and (
                sha256(os.path.join(self.root, sent.path)) == sent.sha256
            )
        except OSError:
            return False

    def give(self, machine: str) -> None:
        """Note that ``machine`` is about to run something in it."""
        self.users[machine] = time.time()
        self.save()

    def save(self) -> None:
        self._place.write_json(self._state_file, {"users": self.users, "settled": self.settled})

    def delete(self, trash: bytes) -> None:
        # The name goes first: nobody ever sees half of it.
        os.rename(self.root, trash)
        shutil.rmtree(trash, ignore_errors=True)
        discard(self.root)


def discard(root: bytes) -> None:
    """Remove a snapshot, or what there is of one, and what is noted about it."""
    shutil.rmtree(root, ignore_errors=True)
    for file in (root + b".json", root + b".state.json"):
        with contextlib.suppress(OSError):
            os.unlink(file)


def walk(root: bytes) -> Iterator[tuple[bytes, os.stat_result]]:
    """Every folder, file and link below ``root``, a folder before what it holds. Not sockets and
    the like, nor the names under which NFS keeps deleted files for their readers."""
    pending = [b""]
    while pending:
        folder = pending.pop()
        try:
            entries = list(os.scandir(os.path.join(root, folder)))
        except FileNotFoundError:
            continue
        for entry in entries:
            if entry.name.startswith(b".nfs0"):
                continue
            path = os.path.join(folder, entry.name)
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if stat.S_ISDIR(status.st_mode):
                pending.append(path)
            elif not (stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode)):
                continue
            yield path, status


def signature(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns


def sha256(path: bytes) -> str:
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        for chunk in iter(lambda: file.read(CHUNK), b""):
            digest.update(chunk)
    return digest.hexdigest()


class Carried:
    """Which outputs of all snapshots a new one with ``tree`` shows."""

    def __init__(self, snapshots: list[Snapshot], current: Snapshot | None, tree: Tree) -> None:
        self.shown: dict[bytes, Output] = {}
        self.settled: list[Output] = []
        """Those shown, and the same files in other snapshots."""
        self.hidden: list[Output] = []
        versions: dict[bytes, list[Output]] = {}
        for snapshot in snapshots:
            for output in snapshot.outputs:
                if snapshot is current or not output.settled:
                    versions.setdefault(output.path, []).append(output)
        taken = set(tree.by_path) | set(tree.links)
        folders = set(tree.folders)
        # In this order a file comes before what another snapshot has in a folder of its name.
        for path in sorted(versions):
            if path in taken or path in folders or not taken.isdisjoint(parents(path)):
                self.hidden += versions[path]
                continue
            taken.add(path)
            latest = max(versions[path], key=lambda o: (o.mtime_ns, o.snapshot.number))
            self.shown[path] = latest
            for output in versions[path]:
                (self.settled if output.mark == latest.mark else self.hidden).append(output)
        self.folders: dict[bytes, int] = {}
        for snapshot in snapshots:
            for path, mode in snapshot.folders.items():
                if path not in taken and taken.isdisjoint(parents(path)):
                    self.folders.setdefault(path, mode)
        needed = {parent for path in self.shown for parent in parents(path)}
        sent = set(tree.folders)
        own = current.folders if current else {}
        old = set(current.tree.folders) if current else set()
        self.folders = {
            path: mode
            for path, mode in sorted(self.folders.items())
            # A folder that somebody made here, even an empty one, or that holds an output.
            if path in needed or (path in own and path not in old and path not in sent)
        }

    def place_into(self, root: bytes) -> list[Output]:
        """Show them in the snapshot at ``root``. Returns those that the file system refuses."""
        for path, mode in self.folders.items():
            with contextlib.suppress(FileExistsError):
                os.mkdir(os.path.join(root, path), mode)
        refused = []
        for output in self.shown.values():
            try:
                output.show(root)
            except FileNotFoundError:
                pass  # Its job has just removed it.
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise
                refused.append(output)
        self.settled = [output for output in self.settled if output not in refused]
        return refused


def parents(path: bytes) -> Iterator[bytes]:
    while b"/" in path:
        path = path[: path.rindex(b"/")]
        yield path


# -- the place ------------------------------------------------------------------------------------


class Place:
    """WORKDIR and the folder beside it that holds its snapshots, the working directory of this
    process from now on. Raises RefusedError, UnsafeError and OSError."""

    def __init__(self, workdir: str, trust: Trust) -> None:
        path = os.path.expanduser(raw(workdir))
        if path.startswith(b"~"):
            raise RefusedError("%s: there is no such user here" % workdir, "write the whole path")
        path = os.path.normpath(os.path.join(os.path.expanduser(b"~"), path))
        self._trust = trust
        self._name = os.path.basename(path)
        self.workdir = path
        if not self._name:
            raise self._occupied("is the root of the file system")
        made: list[bytes] = []
        # The folder above WORKDIR may be sticky, as /tmp is; the one of the snapshots may not.
        self._fd, self.container = trust.open_folder(
            path + b".dtrain", own=1, made=made, private=False
        )
        os.fchdir(self._fd)
        self.workdir = self.container[: -len(b".dtrain")]
        self._parent = os.open(b"..", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        if trust.shares(os.fstat(self._fd)):
            os.umask(0o007)
        try:
            self.check()
        except RefusedError:
            for folder in reversed(made):
                with contextlib.suppress(OSError):
                    os.rmdir(folder)
            raise

    def check(self) -> bytes | None:
        """The name of the current snapshot; RefusedError if WORKDIR is not ours to replace."""
        try:
            status = os.stat(self._name, dir_fd=self._parent, follow_symlinks=False)
        except FileNotFoundError:
            return None
        if not self._trust.owns(status):
            raise self._occupied("belongs to %s" % user_of(status.st_uid))
        if stat.S_ISLNK(status.st_mode):
            folder, name = os.path.split(os.readlink(self._name, dir_fd=self._parent))
            if folder != os.path.basename(self.container) or not NAME.fullmatch(name):
                raise self._occupied("is a link that dtrain did not make")
            return name
        if not stat.S_ISDIR(status.st_mode):
            raise self._occupied("is a file")
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(self._name, flags, dir_fd=self._parent)
        try:
            if os.listdir(fd):
                raise self._occupied("is a folder with files that dtrain did not put there")
        finally:
            os.close(fd)
        return None

    def check_moved(self) -> None:
        """RefusedError if the snapshots are no longer at their path."""
        fd, _ = self._trust.open_folder(self.container, own=1)
        same = os.path.samestat(os.fstat(fd), os.fstat(self._fd))
        os.close(fd)
        if not same:
            raise RefusedError(
                "%s was moved while files were being sent" % printable(self.container),
                "launch again",
            )

    def _occupied(self, what: str) -> RefusedError:
        return RefusedError(
            "%s %s" % (printable(self.workdir), what),
            "choose another job.workdir, which dtrain makes, or move this one away",
        )

    def read_json(self, name: bytes) -> dict[str, Any] | None:
        """None where there is no such file, or it holds something else."""
        try:
            fd = self._trust.open_file(name, os.O_RDONLY, self._fd, self.container)
            with open(fd, "rb") as file:
                body = json.load(file)
        except UnsafeError:
            raise
        except (OSError, ValueError, RecursionError):
            return None
        return body if isinstance(body, dict) else None

    def read_manifest(self, name: bytes) -> Tree | None:
        """What was sent for a snapshot. None where that is unknown: a job may damage the file."""
        body = self.read_json(name + b".json")
        try:
            return None if body is None else Tree(body)
        except (RefusedError, LookupError, TypeError, ValueError, ArithmeticError, AttributeError):
            return None

    def write_json(self, name: bytes, body: dict[str, Any]) -> None:
        draft = name + b".new"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(draft)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        fd = self._trust.open_file(draft, flags, self._fd, self.container, 0o660)
        with open(fd, "wb") as file:
            file.write(json.dumps(body, separators=(",", ":")).encode())
        os.replace(draft, name)

    @contextlib.contextmanager
    def locked(self, patience: float) -> Iterator[Lock]:
        """Hold the lock. RefusedError if its holder makes no progress for ``patience`` seconds."""
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
                    raise RefusedError(
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
                    raise RefusedError(
                        "another launch holds %s/lock and has not moved for %d s (%s)"
                        % (printable(self.container), patience, holder or "holder unknown"),
                        "wait for it or end that process, then launch again",
                    )
            file.truncate(0)
            file.write(("process %d on %s" % (os.getpid(), os.uname().nodename)).encode())
            yield Lock(file)

    def sweep(self) -> None:
        """Remove what killed syncs have left. Under the lock nothing of it is in use."""
        for name in os.listdir(b"."):
            if name.startswith((b".incoming-", b".trash-", b".link-")):
                if os.path.isdir(name) and not os.path.islink(name):
                    shutil.rmtree(name, ignore_errors=True)
                else:
                    os.unlink(name)

    def snapshots(self, current: bytes | None) -> list[Snapshot]:
        """All that are known, oldest first."""
        found = []
        for name in os.listdir(b"."):
            if NAME.fullmatch(name):
                where = os.path.join(self.container, name)
                os.close(self._trust.open_folder(where, own=1)[0])
                tree = self.read_manifest(name)
                if tree is None:
                    if name != current:
                        continue  # Its outputs are unknown: leave it alone.
                    tree = Tree({"digest": "", "folders": [], "links": [], "files": []})
                found.append(Snapshot(self, name, tree))
        return sorted(found, key=lambda snapshot: snapshot.number)

    def next_number(self) -> int:
        """Above those of all snapshots, also of those that nothing is known about."""
        names = map(NAME.fullmatch, os.listdir(b"."))
        return 1 + max((int(name[1]) for name in names if name), default=0)

    def temporary(self, kind: str) -> bytes:
        """A new private folder inside the container."""
        name = b".%s-%s" % (raw(kind), raw(os.urandom(8).hex()))
        os.mkdir(name, 0o770)
        return name

    def switch(self, snapshot: Snapshot) -> None:
        """Let WORKDIR be ``snapshot``, in one step."""
        link = b".link-%d" % os.getpid()
        os.symlink(os.path.join(os.path.basename(self.container), snapshot.name), link)
        if self.check() is None:
            with contextlib.suppress(FileNotFoundError):
                os.rmdir(self._name, dir_fd=self._parent)
        os.replace(link, self._name, dst_dir_fd=self._parent)


class Lock:
    """The lock while it is held; `beat` tells those who wait that there is progress."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._last = 0.0

    def beat(self) -> None:
        if time.monotonic() - self._last > 1:
            self._last = time.monotonic()
            os.utime(self._file.fileno())


# -- who uses a snapshot --------------------------------------------------------------------------


def machine() -> str:
    """A name for this view of processes: what `used_here` can see all of. Survives a reboot."""
    try:
        with open("/etc/machine-id") as file:
            identity = file.read().strip()
    except OSError:
        identity = ""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return "%s %s %s" % (os.uname().nodename, identity, namespace)


def used_here(roots: Iterable[bytes]) -> set[bytes]:
    """Those of ``roots`` that a process on this machine works in, or was started with."""
    roots = set(roots)
    used: set[bytes] = set()
    try:
        processes = [name for name in os.listdir(b"/proc") if name.isdigit()]
    except OSError:
        return roots
    for process in processes:
        about = []
        with contextlib.suppress(OSError):
            about.append(os.readlink(b"/proc/%s/cwd" % process))
        for file in (b"environ", b"cmdline"):
            with contextlib.suppress(OSError), open(b"/proc/%s/%s" % (process, file), "rb") as f:
                about.append(f.read())
        used.update(root for root in roots - used if any(root in what for what in about))
    return used


def given_up(snapshots: list[Snapshot], grace: float) -> list[Snapshot]:
    """The snapshots that this machine needs no more: nothing runs there, and it was not given
    one in the last ``grace`` seconds, so that a launch that is about to start there can."""
    me, now = machine(), time.time()
    used = used_here(snapshot.path for snapshot in snapshots)
    return [s for s in snapshots if s.path not in used and now - s.users.get(me, 0.0) > grace]


# -- the sync -------------------------------------------------------------------------------------


def synchronize(channel: Channel, request: dict[str, Any]) -> dict[str, Any]:
    """Make WORKDIR show the launcher's tree. Returns the answer for the launcher."""
    tree = Tree(request["tree"])
    place = Place(request["workdir"], Trust(request["trust_group"]))
    with place.locked(float(request["patience"])) as lock:
        name = place.check()
        place.sweep()
        snapshots = place.snapshots(name)
        # Before outputs are looked for: what a process writes later, it must be seen running for.
        idle = given_up(snapshots, float(request["grace"]))
        for snapshot in snapshots:
            snapshot.examine()
            lock.beat()
        current = next((s for s in snapshots if s.name == name), None)
        # First of all, so that what was deleted on a full disk makes room now.
        gone = reap(place, [snapshot for snapshot in idle if snapshot is not current])
        snapshots = [snapshot for snapshot in snapshots if snapshot not in gone]
        carried = Carried(snapshots, current, tree)
        notices: list[str] = []
        fresh = current is None or not (
            current.pristine
            and current.tree.digest == tree.digest
            and all(output.snapshot is current for output in carried.shown.values())
        )
        if current is None or fresh:
            name = b"%d-%s" % (place.next_number(), raw(tree.digest[:12]))
            root = place.temporary("incoming")
            try:
                with full_disk_told(place.container):
                    receive(channel, lock, tree, current, root)
                    # Once more: receiving may have taken long, and jobs go on writing.
                    for snapshot in snapshots:
                        snapshot.examine()
                    carried = Carried(snapshots, current, tree)
                    refused = carried.place_into(root)
                    notices += kept_back(
                        carried.hidden, current, "a sent file or a later one is there"
                    )
                    notices += kept_back(refused, None, "the file system cannot link it")
                    place.write_json(name + b".json", tree.manifest())
                    current = Snapshot(place, name, tree)
                    current.give(machine())
                    os.rename(root, name)
                place.switch(current)
            except BaseException:
                shutil.rmtree(root, ignore_errors=True)
                if place.check() != name:
                    discard(name)
                raise
        else:
            channel.answer({"type": "want", "indices": []})
            current.give(machine())
        settle(snapshots, current, carried)
        reap(place, [s for s in idle if s not in gone and s.root != current.root])
        place.check_moved()
        return {"type": "done", "path": text(current.path), "new": fresh, "notices": notices}


def kept_back(outputs: list[Output], only: Snapshot | None, why: str) -> list[str]:
    """One notice for outputs that the new snapshot does not show. Older ones had theirs."""
    told = [output for output in outputs if only is None or output.snapshot is only]
    paths = [os.path.join(output.snapshot.path, output.path) for output in told]
    if not paths:
        return []
    more = " and %d more" % (len(paths) - SHOWN) if len(paths) > SHOWN else ""
    listed = ", ".join(printable(path) for path in sorted(paths)[:SHOWN])
    return ["kept where the job wrote it, because %s: %s%s" % (why, listed, more)]


def settle(snapshots: list[Snapshot], current: Snapshot, carried: Carried) -> None:
    changed: set[Snapshot] = set()
    for output in carried.settled:
        if output.snapshot.root != current.root and not output.settled:
            output.snapshot.settled[text(output.path)] = output.signature
            changed.add(output.snapshot)
    for snapshot in changed:
        snapshot.save()


def reap(place: Place, idle: list[Snapshot]) -> list[Snapshot]:
    """Give up snapshots for this machine. Returns those deleted, because it was the last."""
    deleted = []
    for snapshot in idle:
        if snapshot.users.pop(machine(), None) is not None:
            snapshot.save()
        if not snapshot.users and all(output.settled for output in snapshot.outputs):
            snapshot.delete(place.temporary("trash"))
            deleted.append(snapshot)
    return deleted


def receive(
    channel: Channel, lock: Lock, tree: Tree, current: Snapshot | None, root: bytes
) -> None:
    """Fill ``root`` with ``tree``: from ``current`` what is there, from the launcher the rest."""
    have = dict(current.contents) if current else {}
    wanted: list[int] = []
    asked: set[str] = set()
    for index, sent in enumerate(tree.files):
        if sent.size and sent.sha256 not in have and sent.sha256 not in asked:
            asked.add(sent.sha256)
            wanted.append(index)
    room(os.getcwdb(), sum(tree.files[index].size for index in wanted))
    channel.answer({"type": "want", "indices": wanted})
    for folder in tree.folders:
        os.mkdir(os.path.join(root, folder), 0o770)
    arriving = set(wanted)
    later = []
    for index, sent in enumerate(tree.files):
        if index in arriving:
            continue
        if sent.sha256 in asked:
            later.append(index)
            continue
        source = have.get(sent.sha256)
        with create(root, sent) as file:
            if current is not None and source is not None:
                copy(os.path.join(current.root, source[0]), source[1], file)
            finish(file, sent)
        lock.beat()
    arrived: dict[str, bytes] = {}
    for index in wanted:
        sent = tree.files[index]
        digest, left = hashlib.sha256(), sent.size
        with create(root, sent) as file:
            while left:
                piece = channel.content()
                if not 0 < len(piece) <= left:
                    raise GoneError
                digest.update(piece)
                left -= len(piece)
                write(file, piece)
                lock.beat()
            if digest.hexdigest() != sent.sha256:
                raise RefusedError("a file arrived with another content", changed=index)
            finish(file, sent)
        arrived[sent.sha256] = os.path.join(root, sent.path)
    for index in later:
        sent = tree.files[index]
        with create(root, sent) as file:
            source_path = arrived[sent.sha256]
            copy(source_path, signature(os.stat(source_path)), file)
            finish(file, sent)
    for path, target in tree.links.items():
        os.symlink(target, os.path.join(root, path))


def room(folder: bytes, needed: int) -> None:
    """Refuse early what cannot fit."""
    disk = os.statvfs(folder)
    if needed > disk.f_bavail * disk.f_frsize:
        raise full(folder, needed)


def full(folder: bytes, needed: int | None = None) -> RefusedError:
    disk = os.statvfs(folder)
    free = "%.1f MiB free" % (disk.f_bavail * disk.f_frsize / 2**20)
    if needed is not None:
        free += ", %.1f MiB needed" % (needed / 2**20)
    elif disk.f_files and not disk.f_favail:
        free = "no inode free"
    return RefusedError(
        "no space left in %s (%s)" % (printable(folder), free),
        "free some there, add what the job does not need to job.sync.exclude, "
        "or choose a job.workdir on another disk",
    )


@contextlib.contextmanager
def full_disk_told(folder: bytes) -> Iterator[None]:
    """Measure what is free when the disk is full, not after the cleanup."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise full(folder) from None


def create(root: bytes, sent: Sent) -> Any:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    mode = 0o770 if sent.executable else 0o660
    fd = os.open(os.path.join(root, sent.path), flags, mode)
    return open(fd, "wb", buffering=0)


def write(file: Any, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def copy(source: bytes, expected: tuple[int, int], file: Any) -> None:
    """Copy a sent file into a new snapshot; the disk shares the bytes where it can."""
    with open(source, "rb", buffering=0) as content:
        try:
            while os.copy_file_range(content.fileno(), file.fileno(), 1 << 30):
                pass
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
        except AttributeError:
            pass  # A Python built for an old system.
        if file.tell() != expected[0]:
            content.seek(0)
            file.seek(0)
            for chunk in iter(lambda: content.read(CHUNK), b""):
                write(file, chunk)
        if signature(os.fstat(content.fileno())) != expected or file.tell() != expected[0]:
            raise RefusedError(
                "%s was edited on the node while it was copied"
                % printable(os.path.abspath(source)),
                "launch again",
            )


def finish(file: Any, sent: Sent) -> None:
    """Set the time, and note how it reads here: not every file system keeps nanoseconds."""
    os.utime(file.fileno(), ns=(sent.mtime_ns, sent.mtime_ns))
    status = os.fstat(file.fileno())
    sent.mtime_ns, sent.mode = status.st_mtime_ns, stat.S_IMODE(status.st_mode)


def main(stream: BinaryIO, importer: Importer) -> None:
    os.umask(0o077)
    channel = Channel(stream, sys.stdout.buffer)

    def give_up(number: int, frame: Any) -> None:
        raise GoneError

    for number in (signal.SIGALRM, signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, give_up)
    folder = b""
    try:
        channel.greet()
        request = channel.request()
        folder = raw(request["workdir"])
        try:
            answer = synchronize(channel, request)
        except RefusedError as refused:
            answer = refused.reply
        except UnsafeError as error:
            answer = RefusedError(error.reason, error.hint("`job.workdir`")).reply
        except OSError as error:
            answer = explain(error, folder).reply
        channel.answer(answer)
    except (GoneError, BrokenPipeError):
        sys.exit(1)


def explain(error: OSError, workdir: bytes) -> RefusedError:
    """What the system said, for a person."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        folder = os.path.join(os.path.expanduser(b"~"), os.path.expanduser(workdir))
        while not os.path.isdir(folder):
            folder = os.path.dirname(folder)
        return full(os.path.realpath(folder))
    where = workdir if error.filename is None else error.filename
    where = os.path.abspath(where if isinstance(where, bytes) else os.fsencode(str(where)))
    denied = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
    hint = "choose a job.workdir that you may write to" if denied else "look at job.workdir"
    return RefusedError("%s: %s" % (printable(where), error.strerror or error), hint)
