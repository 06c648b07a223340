"""The working folder on the launching machine at the time of a launch.

The threads of all hosts share one `Tree`, scanned once, so that every host gets the same files. A
file that changes after the scan no longer has its hash and causes an error, never a mixture of
versions.

Paths are text with ``/`` between names, relative to the folder. Bytes that are not UTF-8 become
surrogate escapes in any locale, and reach the node unchanged.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import field
from pathlib import Path

from dtrain.diagnostics import StoppedError, UsageError
from dtrain.node.agent.wire import raw
from dtrain.records import dataclass
from dtrain.sync.contents import Contents, File, local_path
from dtrain.sync.exclude import exclusion
from dtrain.sync.walk import FolderWalk, shown

_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Tree:
    """The files to copy to every node. Every parent of a path is in ``folders``."""

    source: Path
    folders: tuple[str, ...]
    """Each parent before its contents."""
    links: tuple[tuple[str, str], ...]
    """Symbolic links: path and target."""
    files: tuple[File, ...]
    digest: str
    """Identifies the tree: equal for equal paths, contents, link targets and executable bits."""
    contents: Contents = field(compare=False, repr=False)
    notices: tuple[str, ...] = field(default=(), compare=False)
    """Messages for the user, one sentence each."""

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    def has(self, path: str) -> bool:
        """Whether ``path`` is a file or below a link, which may lead to one."""
        return any(path == file.path for file in self.files) or any(
            f"{path}/".startswith(f"{link}/") for link, _ in self.links
        )


def local_folder(name: str, base: Path) -> Path:
    """A folder of this machine that the cluster file names. A relative path starts at ``base``."""
    # Unlike pathlib, this keeps the `~` of an unknown user: there is no such folder.
    return base / os.path.expanduser(name)


def scan(source: Path, exclude: Sequence[str], stopped: Callable[[], bool] = lambda: False) -> Tree:
    """Read ``source`` except paths that match ``exclude`` (patterns: see `dtrain.sync.exclude`).

    Raises UsageError with every path that cannot be sent: unreadable files, symbolic links that
    lead outside, a folder too large to be code. Raises StoppedError once the user has ``stopped``
    it: gigabytes take minutes.
    """
    root = os.path.realpath(os.fsencode(source))
    if not os.path.isdir(root):
        what = "is not a folder" if os.path.exists(root) else "does not exist"
        raise UsageError(
            f"job.sync.source: {source} {what}",
            hint="name the folder that holds the training script, relative to the cluster file",
        )

    def go_on() -> None:
        if stopped():
            raise StoppedError(f"stopped while reading {source}; nothing was started")

    found = FolderWalk(source, root)
    found.run(exclusion(exclude), go_on)
    found.refuse_if_bad()
    read = (_read(root, path, go_on) for path in sorted(found.files))
    files = tuple(file for file in read if file is not None)
    folders, links = tuple(sorted(found.folders)), tuple(sorted(found.links))
    return Tree(
        source=Path(os.fsdecode(root)),
        folders=folders,
        links=links,
        files=files,
        digest=_digest(folders, links, files),
        contents=Contents(root),
        notices=tuple(found.notices()),
    )


def _read(root: bytes, path: str, go_on: Callable[[], None]) -> File | None:
    """Hash one file. Retries once if the file changes while it is read. None if it was removed
    after the walk, such as a temporary file."""
    for _ in range(2):
        try:
            with open(local_path(root, path), "rb", buffering=0) as file:
                before = os.fstat(file.fileno())
                digest = hashlib.sha256()
                size = 0
                while chunk := file.read(_CHUNK):
                    go_on()
                    digest.update(chunk)
                    size += len(chunk)
                after = os.fstat(file.fileno())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UsageError(
                f"job.sync: {shown(path)} in {os.fsdecode(root)} cannot be read ({error.strerror})",
                hint="make it readable, or add it to job.sync.exclude",
            ) from None
        if (before.st_size, before.st_mtime_ns) == (size, after.st_mtime_ns):
            executable = bool(after.st_mode & (stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH))
            return File(path, size, executable, after.st_mtime_ns, digest.hexdigest())
    raise UsageError(
        f"job.sync: {shown(path)} in {os.fsdecode(root)} changes while it is read",
        hint="wait until no program writes to it, or add it to job.sync.exclude",
    )


def _digest(folders: Sequence[str], links: Sequence[tuple[str, str]], files: Sequence[File]) -> str:
    """A hash over everything except times. NUL ends each part, because no path contains it."""
    digest = hashlib.sha256()
    for folder in folders:
        digest.update(_parts("folder", folder))
    for path, target in links:
        digest.update(_parts("link", path, target))
    for file in files:
        digest.update(_parts("program" if file.executable else "file", file.path, file.sha256))
    return digest.hexdigest()


def _parts(*parts: str) -> bytes:
    return b"".join(raw(part) + b"\0" for part in parts)
