"""Bringing the working folder to one host: the launcher's half of `dtrain.node.sync`."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from dtrain.diagnostics import AnswerError, NodeError, PrepareError
from dtrain.messages.decode import ProtocolError
from dtrain.messages.sync import Done, Refused, Want, max_answer, read_answer
from dtrain.node.sync.wire import ABANDONED, LENGTH, PREAMBLE, REQUEST
from dtrain.spec.model import Host
from dtrain.sync.contents import SourceChangedError, frame
from dtrain.sync.source import Tree, shown
from dtrain.transport import node_program
from dtrain.transport.contract import Connection, RemoteProcess
from dtrain.transport.incoming import Incoming

ATTEMPTED = "sending the working folder"
_WRITE = 1 << 18
_CLEANUP = 10.0
"""Seconds to wait for the receiver to end after its answer."""
_Answer = TypeVar("_Answer", Want, Done)


@dataclass(frozen=True, slots=True)
class Patience:
    """Times in seconds."""

    lock: float = 120.0
    """How long another sync of the same folder may show no progress."""
    unused: float = 900.0
    """How long a snapshot is kept for a launch that was given it and has started nothing yet."""


@dataclass(frozen=True, slots=True)
class SyncResult:
    sent_files: int
    sent_bytes: int
    """Bytes of the files sent, before compression."""
    unchanged_files: int
    """Files whose content the node had already."""
    tree_path: str
    """Absolute path of the snapshot on the node: where this launch's workers start. ``workdir``
    is a link that leads there until the next sync."""
    notices: tuple[str, ...] = ()
    """What the user should know, one sentence each."""


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
    """Make ``workdir`` on ``host`` show ``tree``; blocks until it does.

    A relative ``workdir`` starts at the home folder; ``python`` runs the receiver in place of the
    host's own, which may be there only after `job.setup`. Members of
    ``trust_group``, a Unix group of the host, may own the folder and write to it.

    Raises PrepareError when it cannot be, and ConnectError when the connection breaks; in both
    cases the node shows what it showed before.
    """
    if host.transport == "local":
        _refuse_inside_source(host, tree, workdir)
    python = python or host.python
    process = node_program.start(connection, "sync", python, label="sync")
    try:
        return _converse(process, host, python, tree, workdir, trust_group, patience)
    finally:
        # It cleans up and frees the lock; what happens next on that host should find that done.
        process.close_stdin()
        with suppress(TimeoutError, NodeError):
            process.wait(_CLEANUP)
        process.close()


def _converse(
    process: RemoteProcess,
    host: Host,
    python: str,
    tree: Tree,
    workdir: str,
    trust_group: str | None,
    patience: Patience,
) -> SyncResult:
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
    process.write(frame(REQUEST, zlib.compress(json.dumps(request).encode(), 1)))
    receiver = _Receiver(process, host, python, tree)
    wanted = receiver.answer(Want).indices
    files = [tree.files[index] for index in wanted]
    try:
        # Through a pipe on one machine, compression only costs.
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
    """The contents asked for, small files gathered: every write costs a packet and a wakeup."""
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
    """What the program on the node answers."""

    def __init__(self, process: RemoteProcess, host: Host, python: str, tree: Tree) -> None:
        self._process = process
        self._python = python
        self._incoming = Incoming(process)
        self._host = host
        self._tree = tree
        self._greeted = False

    def answer(self, expected: type[_Answer]) -> _Answer:
        """The next answer. Raises NodeError where it is another one, or there is none."""
        host, files = self._host, self._tree.files
        try:
            found = read_answer(self._payload(), len(files))
        except EOFError:
            raise node_program.failure(
                host.name, ATTEMPTED, self._python, self._process, self._incoming.rest
            ) from None
        except ProtocolError as error:
            raise AnswerError(host.name, ATTEMPTED, error) from None
        if isinstance(found, expected):
            return found
        if not isinstance(found, Refused):
            raise AnswerError(host.name, ATTEMPTED, "an answer that was not asked for")
        if found.changed is not None:
            raise _changed(host, self._tree, files[found.changed].path)
        raise PrepareError(host.name, ATTEMPTED, found.reason, hint=found.hint)

    def _payload(self) -> bytes:
        if not self._greeted:
            self._incoming.preamble(PREAMBLE)
            self._greeted = True
        (length,) = LENGTH.unpack(self._incoming.exactly(LENGTH.size))
        if length > max_answer(len(self._tree.files)):
            raise ProtocolError(f"an answer of {length} bytes")
        return self._incoming.exactly(length)


def _changed(host: Host, tree: Tree, path: str) -> PrepareError:
    # Sending its new content would give this host another state than the hosts before it.
    return PrepareError(
        host.name,
        ATTEMPTED,
        f"{shown(path)} in {tree.source} changed while it was being sent",
        hint="launch again when nothing writes to it, or add it to job.sync.exclude",
    )


def _refuse_inside_source(host: Host, tree: Tree, workdir: str) -> None:
    """Each sync would send the snapshots of the last."""
    here = (Path.home() / Path(workdir).expanduser()).resolve()
    source = tree.source.resolve()
    if here == source or source in here.parents:
        raise PrepareError(
            host.name,
            ATTEMPTED,
            f"{workdir} lies in the folder that is to be sent, {tree.source}",
            hint="choose a job.workdir outside it, or leave out job.sync on this machine",
        )
