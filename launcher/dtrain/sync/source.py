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
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field
from pathlib import Path

from dtrain.diagnostics import StoppedError, UsageError
from dtrain.records import dataclass
from dtrain.sync.contents import Contents, File, local_path
from dtrain.sync.exclude import Exclusion
from dtrain.wording import counted, in_bytes

MANY_FILES, MUCH = 50_000, 1 << 30
"""Files and bytes above which a tree gets a notice."""
TOO_MANY_FILES, TOO_MUCH = 1_000_000, 64 << 30
"""Files and bytes above which a tree is refused unread: probably a data set by mistake."""
_CHUNK = 1 << 20
_SHOWN = 5


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

    found = _walk(root, Exclusion(exclude), go_on)
    found.refuse_if_bad(source)
    files = tuple(_read(root, path, go_on) for path in sorted(found.files))
    folders, links = tuple(sorted(found.folders)), tuple(sorted(found.links))
    return Tree(
        source=Path(os.fsdecode(root)),
        folders=folders,
        links=links,
        files=files,
        digest=_digest(folders, links, files),
        contents=Contents(root),
        notices=tuple(found.notices(source)),
    )


def shown(path: str) -> str:
    """``path`` for a message: on one line, and printable."""
    return path if path.isprintable() else ascii(path)


@dataclass(slots=True)
class _Found:
    """The result of a walk over the folder, before any file is opened."""

    files: dict[str, int] = field(default_factory=dict)
    """Path and size."""
    folders: list[str] = field(default_factory=list)
    links: list[tuple[str, str]] = field(default_factory=list)
    special: list[str] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)
    outside: bool = False

    def refuse_if_bad(self, source: Path) -> None:
        if self.bad:
            more = len(self.bad) - _SHOWN
            listed = self.bad[:_SHOWN] + ([f"and {more} more"] if more > 0 else [])
            raise UsageError(
                f"job.sync: {source} cannot be sent: " + "; ".join(listed),
                hint=(
                    "a link must be relative and stay inside the folder; "
                    if self.outside
                    else "make it readable, or "
                )
                + "add what the job does not need to job.sync.exclude",
            )
        if len(self.files) > TOO_MANY_FILES or sum(self.files.values()) > TOO_MUCH:
            raise UsageError(
                f"job.sync: {source} is too big to send: {self._weight()}",
                hint="add data and environments to job.sync.exclude, "
                "and copy them to the nodes another way",
            )

    def notices(self, source: Path) -> Iterator[str]:
        if len(self.files) > MANY_FILES or sum(self.files.values()) > MUCH:
            yield (
                f"{source} is big for a working folder: {self._weight()}; "
                "add what the job does not need to job.sync.exclude"
            )
        if self.special:
            listed = ", ".join(shown(path) for path in sorted(self.special)[:_SHOWN])
            yield f"not sent, because they are sockets, pipes or devices: {listed}"

    def _weight(self) -> str:
        """The totals and the heaviest entries of the top folder."""
        sizes: Counter[str] = Counter()
        counts: Counter[str] = Counter()
        for path, size in self.files.items():
            top = path.split("/", 1)[0] + ("/" if "/" in path else "")
            sizes[top] += size
            counts[top] += 1
        by = sizes if sum(sizes.values()) > MUCH else counts
        heaviest = ", ".join(
            f"{shown(top)} ({in_bytes(sizes[top])} in {counted(counts[top], 'file')})"
            for top, _ in by.most_common(3)
        )
        files = counted(len(self.files), "file")
        return f"{in_bytes(sum(sizes.values()))} in {files}, most in {heaviest}"


def _walk(root: bytes, exclusion: Exclusion, go_on: Callable[[], None]) -> _Found:
    found = _Found()
    pending = [""]
    while pending:
        go_on()
        folder = pending.pop()
        try:
            entries = list(os.scandir(local_path(root, folder)))
        except OSError as error:
            found.bad.append(f"{shown(folder) or root!r} cannot be read ({error.strerror})")
            continue
        for entry in entries:
            name = entry.name.decode("utf-8", "surrogateescape")
            path = f"{folder}/{name}" if folder else name
            is_folder = entry.is_dir(follow_symlinks=False)
            if exclusion.covers(path, folder=is_folder):
                continue
            if is_folder:
                found.folders.append(path)
                pending.append(path)
                continue
            try:
                _add(found, root, path, entry)
            except FileNotFoundError:
                continue  # removed after its folder was read, such as an editor's temporary file
            except OSError as error:
                found.bad.append(f"{shown(path)} cannot be read ({error.strerror})")
    return found


def _add(found: _Found, root: bytes, path: str, entry: os.DirEntry[bytes]) -> None:
    """Raises OSError."""
    if entry.is_symlink():
        _add_link(found, root, path)
    elif entry.is_file(follow_symlinks=False):
        found.files[path] = entry.stat(follow_symlinks=False).st_size
    else:
        found.special.append(path)


def _add_link(found: _Found, root: bytes, path: str) -> None:
    where = local_path(root, path)
    raw = os.readlink(where)
    target = raw.decode("utf-8", "surrogateescape")
    lexical = os.path.normpath(os.path.join(os.path.dirname(path), target))
    # Both interpretations of `..` must stay inside. The node checks only the text.
    real = os.path.realpath(where)
    inside = real == root or real.startswith(root.rstrip(b"/") + b"/")
    if os.path.isabs(raw) or lexical == ".." or lexical.startswith("../") or not inside:
        found.outside = True
        found.bad.append(f"{shown(path)} is a link to {shown(target)}, which leads outside")
    else:
        found.links.append((path, target))


def _read(root: bytes, path: str, go_on: Callable[[], None]) -> File:
    """Hash one file. Retries once if the file changes while it is read."""
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
    return b"".join(part.encode("utf-8", "surrogateescape") + b"\0" for part in parts)
