"""Fills a new snapshot from the last snapshot and from the launcher."""

from __future__ import annotations

import errno
import hashlib
import os
import stat

from dtrain.node.agent.wire import write_all
from dtrain.node.sync.errors import LauncherGoneError, SyncRefusedError, check_free_space
from dtrain.node.sync.snapshots import signature
from dtrain.node.sync.wire import CHUNK
from dtrain.node.trust import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from dtrain.node.sync.channel import Channel
    from dtrain.node.sync.manifest import Manifest, SentFile
    from dtrain.node.sync.snapshots import Snapshot
    from dtrain.node.sync.store import StoreLock


def receive(
    channel: Channel, lock: StoreLock, tree: Manifest, current: Snapshot | None, root: bytes
) -> None:
    """Fill ``root`` with ``tree``: copy the files that ``current`` has, and receive the rest."""
    have = dict(current.contents) if current else {}
    wanted: dict[str, int] = {}  # the first file with each content that is not here
    for index, sent in enumerate(tree.files):
        if sent.size and sent.sha256 not in have:
            wanted.setdefault(sent.sha256, index)
    check_free_space(os.getcwdb(), sum(tree.files[index].size for index in wanted.values()))
    channel.answer({"type": "want", "indices": [*wanted.values()]})
    for folder in tree.folders:
        os.mkdir(os.path.join(root, folder), 0o770)
    for sent in tree.files:
        if sent.sha256 in wanted:
            continue
        with create(root, sent) as file:
            if current is not None and sent.sha256 in have:
                path, expected = have[sent.sha256]
                copy(os.path.join(current.root, path), expected, file)
            finish(file, sent)
        lock.beat()
    for index in wanted.values():
        receive_file(channel, lock, tree, index, root)
    for index, sent in enumerate(tree.files):
        first = wanted.get(sent.sha256, index)
        if first != index:
            source = os.path.join(root, tree.files[first].path)
            with create(root, sent) as file:
                copy(source, signature(os.stat(source)), file)
                finish(file, sent)
    for path, target in tree.links.items():
        os.symlink(target, os.path.join(root, path))


def receive_file(
    channel: Channel, lock: StoreLock, tree: Manifest, index: int, root: bytes
) -> None:
    sent = tree.files[index]
    digest, left = hashlib.sha256(), sent.size
    with create(root, sent) as file:
        while left:
            piece = channel.content()
            if not 0 < len(piece) <= left:
                raise LauncherGoneError
            digest.update(piece)
            left -= len(piece)
            write_all(file.fileno(), piece)
            lock.beat()
        if digest.hexdigest() != sent.sha256:
            raise SyncRefusedError("a file arrived with another content", changed=index)
        finish(file, sent)


def create(root: bytes, sent: SentFile) -> Any:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    mode = 0o770 if sent.executable else 0o660
    fd = os.open(os.path.join(root, sent.path), flags, mode)
    return open(fd, "wb", buffering=0)


def copy(source: bytes, expected: tuple[int, int], file: Any) -> None:
    """Copy a sent file into a new snapshot. The copy shares disk blocks if the file system can."""
    with open(source, "rb", buffering=0) as content:
        try:
            while os.copy_file_range(content.fileno(), file.fileno(), 1 << 30):
                pass
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
        except AttributeError:
            pass  # Python was built for an old system.
        if file.tell() != expected[0]:
            content.seek(0)
            file.seek(0)
            for chunk in iter(lambda: content.read(CHUNK), b""):
                write_all(file.fileno(), chunk)
        if signature(os.fstat(content.fileno())) != expected or file.tell() != expected[0]:
            raise SyncRefusedError(
                "%s was edited on the node while it was copied"
                % printable(os.path.abspath(source)),
                "launch again",
            )


def finish(file: Any, sent: SentFile) -> None:
    """Set the time, and note the result: some file systems do not keep nanoseconds."""
    os.utime(file.fileno(), ns=(sent.mtime_ns, sent.mtime_ns))
    status = os.fstat(file.fileno())
    sent.mtime_ns, sent.mode = status.st_mtime_ns, stat.S_IMODE(status.st_mode)
