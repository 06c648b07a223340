"""Sends the working folder to one host: the launcher's side of `dtrain.node.sync`."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from dtrain.diagnostics import AnswerError, NodeError, PrepareError
from dtrain.messages.decode import ProtocolError
from dtrain.messages.sync import Done, SyncRefused, Want, max_answer, read_answer
from dtrain.node.sync.wire import ABANDONED, PREAMBLE, REQUEST
from dtrain.records import dataclass
from dtrain.spec.model import Host
from dtrain.sync.contents import SourceChangedError, frame
from dtrain.sync.source import Tree, local_folder
from dtrain.sync.walk import shown
from dtrain.transport import node_program
from dtrain.transport.contract import Connection, RemoteProcess
from dtrain.transport.incoming import Incoming
from dtrain.wording import counted, in_bytes

ATTEMPTED = "sending the working folder"
_WRITE = 1 << 18
_CLEANUP = 10.0
"""Seconds to wait for the receiver to exit after its answer."""
_Answer = TypeVar("_Answer", Want, Done)


@dataclass(frozen=True, slots=True)
class Patience:
    """Times in seconds."""

    lock: float = 120.0
    """How long another sync of the same folder may make no progress."""
    unused: float = 900.0
    """How long to keep a snapshot for a launch that has not started its workers yet."""


@dataclass(frozen=True, slots=True)
class SyncResult:
    sent_files: int
    sent_bytes: int
    """Bytes of the files sent, before compression."""
    unchanged_files: int
    """Files whose content the node already had."""
    tree_path: str
    """Absolute path of the snapshot on the node, where this launch's workers start. ``workdir``
    is a link to it until the next sync."""
    notices: tuple[str, ...] = ()
    """Messages for the user, one sentence each."""

    def summary(self, where: str) -> str:
        """What was sent to ``where``."""
        known = self.unchanged_files
        same = f"; {known} {'was' if known == 1 else 'were'} up to date" if known else ""
        files = counted(self.sent_files, "file")
        return f"sent {files} ({in_bytes(self.sent_bytes)}) to {where}{same}"


def send(
    connection: Connection,
    host: Host,
    tree: Tree,
    workdir: str,
    *,
    python: str | None = None,
    trust_group: str | None = None,
    patience: Patience = Patience(),
) -> SyncResult:
    """Copy ``tree`` to ``workdir`` on ``host``. Blocks until it is done.

    A relative ``workdir`` starts at the home folder. ``python`` runs the receiver instead of the
    host's own Python, which may not exist before `job.setup`. Members of ``trust_group``, a Unix
    group of the host, may own the folder and write to it.

    Raises PrepareError if the copy fails, and ConnectError if the connection is lost. In both
    cases ``workdir`` keeps its previous content.
    """
    if host.transport == "local":
        _refuse_inside_source(host, tree, workdir)
    python = python or host.python
    request = {
        "workdir": workdir,
        "trust_group": trust_group,
        "patience": patience.lock,
        "grace": patience.unused,
        "tree": {
            "digest": tree.digest,
            "folders": tree.folders,
            "links": tree.links,
            "files": [(f.path, f.size, f.executable, f.sha256, f.mtime_ns) for f in tree.files],
        },
    }
    process = node_program.start(connection, "sync", python, label="sync")
    try:
        process.write(frame(REQUEST, zlib.compress(json.dumps(request).encode(), 1)))
        return _deliver(_Receiver(process, host, python, tree))
    finally:
        # Wait until the receiver has cleaned up and released its lock.
        process.close_stdin()
        with suppress(TimeoutError, NodeError):
            process.wait(_CLEANUP)
        process.close()


def _deliver(receiver: _Receiver) -> SyncResult:
    """Send the files that the receiver asks for."""
    process, host, tree = receiver.process, receiver.host, receiver.tree
    wanted = receiver.answer(Want).indices
    files = [tree.files[index] for index in wanted]
    try:
        # On the same machine compression costs more than it saves.
        for block in _blocks(tree, wanted, deflate=host.transport != "local"):
            process.write(block)
    except SourceChangedError as changed:
        process.write(frame(ABANDONED, b""))
        raise _changed(host, tree, changed.path) from None
    process.close_stdin()
    done = receiver.answer(Done)
    return SyncResult(
        sent_files=len(files),
        sent_bytes=sum(file.size for file in files),
        unchanged_files=len(tree.files) - len(files),
        tree_path=done.path,
        notices=done.notices,
    )


def _blocks(tree: Tree, indices: Sequence[int], *, deflate: bool) -> Iterator[bytes]:
    """The requested contents. Small files are combined: each write costs a packet and a wakeup."""
    gathered, size = [], 0
    for index in indices:
        for piece in tree.contents.frames(tree.files[index], deflate=deflate):
            gathered.append(piece)
            size += len(piece)
            if size >= _WRITE:
                yield b"".join(gathered)
                gathered, size = [], 0
    yield b"".join(gathered)


class _Receiver:
    """Reads the answers of the program on the node."""

    def __init__(self, process: RemoteProcess, host: Host, python: str, tree: Tree) -> None:
        self.process = process
        self._python = python
        self._incoming = Incoming(process)
        self.host = host
        self.tree = tree
        self._greeted = False

    def answer(self, expected: type[_Answer]) -> _Answer:
        """The next answer. Raises NodeError if it is missing or of another type."""
        host, files = self.host, self.tree.files
        try:
            if not self._greeted:
                self._incoming.preamble(PREAMBLE)
                self._greeted = True
            line = self._incoming.until(b"\n", max_answer(len(files)))
            found = read_answer(line, len(files))
        except EOFError:
            raise node_program.failure(
                host.name, ATTEMPTED, self._python, self.process, self._incoming.pieces.end
            ) from None
        except ProtocolError as error:
            raise AnswerError(host.name, ATTEMPTED, error) from None
        if isinstance(found, expected):
            return found
        if not isinstance(found, SyncRefused):
            raise AnswerError(host.name, ATTEMPTED, "an unexpected answer")
        if found.changed is not None:
            raise _changed(host, self.tree, files[found.changed].path)
        raise PrepareError(host.name, ATTEMPTED, found.reason, hint=found.hint)


def _changed(host: Host, tree: Tree, path: str) -> PrepareError:
    # Other hosts already have the old content, so do not send the new one.
    return PrepareError(
        host.name,
        ATTEMPTED,
        f"{shown(path)} in {tree.source} changed during the transfer",
        hint="launch again when no program writes to it, or add it to job.sync.exclude",
    )


def _refuse_inside_source(host: Host, tree: Tree, workdir: str) -> None:
    """Raise PrepareError if each sync would send the snapshots of the previous one."""
    here = local_folder(workdir, local_folder("~", Path("/"))).resolve()
    source = tree.source.resolve()
    if here == source or source in here.parents:
        raise PrepareError(
            host.name,
            ATTEMPTED,
            f"{workdir} is inside the folder to send, {tree.source}",
            hint="set job.workdir to a folder outside it, or remove job.sync",
        )
