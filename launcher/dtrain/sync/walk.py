"""A walk over the folder to send, before any file is opened."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from dtrain.diagnostics import UsageError
from dtrain.node.agent.wire import text
from dtrain.sync.contents import local_path
from dtrain.wording import counted, in_bytes

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

MANY_FILES, MUCH = 50_000, 1 << 30
"""Files and bytes above which a tree gets a notice."""
TOO_MANY_FILES, TOO_MUCH = 1_000_000, 64 << 30
"""Files and bytes above which a tree is refused and no more of it is read: probably a data set."""
_SHOWN = 5


class FolderWalk:
    """What the folder has."""

    def __init__(self, source: Path, root: bytes) -> None:
        """``root``: the real path of ``source``, which messages name."""
        self.files: dict[str, int] = {}
        """Path and size."""
        self.folders: list[str] = []
        self.links: list[tuple[str, str]] = []
        """Path and target."""
        self._source, self._root = source, root
        self._special: list[str] = []
        self._bad: list[str] = []
        self._outside = False
        """Whether a link leads outside."""
        self._bytes = 0

    def run(self, exclusion: GitIgnoreSpec, go_on: Callable[[], None]) -> None:
        """Walk, without what ``exclusion`` matches. ``go_on`` is called for each folder."""
        pending = [""]
        while pending:
            go_on()
            folder = pending.pop()
            try:
                entries = list(os.scandir(local_path(self._root, folder)))
            except OSError as error:
                if folder and isinstance(error, FileNotFoundError):
                    continue  # removed after the folder above it was read
                name = shown(folder or os.fsdecode(self._root))
                self._bad.append(f"{name} cannot be read ({error.strerror})")
                continue
            if folder:
                self.folders.append(folder)
            for entry in entries:
                if self._too_big():
                    return
                name = text(entry.name)
                path = f"{folder}/{name}" if folder else name
                try:
                    is_folder = entry.is_dir(follow_symlinks=False)
                    if exclusion.match_file(f"{path}/" if is_folder else path):
                        continue
                    if is_folder:
                        pending.append(path)
                    else:
                        self._add(path, entry)
                except FileNotFoundError:
                    continue  # removed after its folder was read, such as a temporary file
                except OSError as error:
                    self._bad.append(f"{shown(path)} cannot be read ({error.strerror})")

    def _add(self, path: str, entry: os.DirEntry[bytes]) -> None:
        """Raises OSError."""
        if entry.is_symlink():
            self._add_link(path)
        elif entry.is_file(follow_symlinks=False):
            self.files[path] = entry.stat(follow_symlinks=False).st_size
            self._bytes += self.files[path]
        else:
            self._special.append(path)

    def _add_link(self, path: str) -> None:
        where, root = local_path(self._root, path), self._root
        target = text(os.readlink(where))
        lexical = os.path.normpath(os.path.join(os.path.dirname(path), target))
        # Both interpretations of `..` must stay inside. The node checks only the text.
        real = os.path.realpath(where)
        inside = real == root or real.startswith(root.rstrip(b"/") + b"/")
        if os.path.isabs(target) or lexical == ".." or lexical.startswith("../") or not inside:
            self._outside = True
            self._bad.append(f"{shown(path)} is a link to {shown(target)}, which leads outside")
        else:
            self.links.append((path, target))

    def refuse_if_bad(self) -> None:
        """Raise UsageError if the folder cannot be sent."""
        if self._too_big():
            raise UsageError(
                f"job.sync: {self._source} is too big to send: at least {self._weight()}",
                hint="add data and environments to job.sync.exclude, "
                "and copy them to the nodes another way",
            )
        if self._bad:
            more = len(self._bad) - _SHOWN
            listed = self._bad[:_SHOWN] + ([f"and {more} more"] if more > 0 else [])
            raise UsageError(
                f"job.sync: {self._source} cannot be sent: " + "; ".join(listed),
                hint=(
                    "a link must be relative and stay inside the folder; "
                    if self._outside
                    else "make it readable, or "
                )
                + "add what the job does not need to job.sync.exclude",
            )

    def notices(self) -> Iterator[str]:
        """Messages for the user, one sentence each."""
        if len(self.files) > MANY_FILES or self._bytes > MUCH:
            yield (
                f"{self._source} is big for a working folder: {self._weight()}; "
                "add what the job does not need to job.sync.exclude"
            )
        if self._special:
            listed = ", ".join(shown(path) for path in sorted(self._special)[:_SHOWN])
            yield f"not sent, because they are sockets, pipes or devices: {listed}"

    def _too_big(self) -> bool:
        return len(self.files) > TOO_MANY_FILES or self._bytes > TOO_MUCH

    def _weight(self) -> str:
        """The totals and the heaviest entries of the top folder."""
        sizes: Counter[str] = Counter()
        counts: Counter[str] = Counter()
        for path, size in self.files.items():
            top = path.split("/", 1)[0] + ("/" if "/" in path else "")
            sizes[top] += size
            counts[top] += 1
        by = sizes if self._bytes > MUCH else counts
        heaviest = ", ".join(
            f"{shown(top)} ({in_bytes(sizes[top])} in {counted(counts[top], 'file')})"
            for top, _ in by.most_common(3)
        )
        files = counted(len(self.files), "file")
        return f"{in_bytes(self._bytes)} in {files}, most in {heaviest}"


def shown(path: str) -> str:
    """``path`` for a message: on one line, and printable."""
    return path if path.isprintable() else ascii(path)
