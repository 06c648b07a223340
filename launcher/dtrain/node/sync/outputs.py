"""Chooses the outputs of older snapshots that a new snapshot shows."""

from __future__ import annotations

import contextlib
import errno
import os

from dtrain.node.agent.wire import text
from dtrain.node.trust import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Iterator

    from dtrain.node.sync.manifest import Manifest
    from dtrain.node.sync.snapshots import Output, Snapshot

SHOWN = 5
"""Outputs that one notice lists."""


class CarriedOutputs:
    """The outputs of all snapshots that a new snapshot with ``tree`` shows."""

    def __init__(self, snapshots: list[Snapshot], current: Snapshot | None, tree: Manifest) -> None:
        self.shown: dict[bytes, Output] = {}
        self.settled: list[Output] = []
        """The shown outputs, and the same files in other snapshots."""
        self.hidden: list[Output] = []
        versions: dict[bytes, list[Output]] = {}
        for snapshot in snapshots:
            for output in snapshot.outputs:
                if snapshot is current or not output.settled:
                    versions.setdefault(output.path, []).append(output)
        taken = set(tree.by_path) | set(tree.links)
        sent = set(tree.folders)
        # Sorted, so that a file comes before the contents of another snapshot's folder of its name.
        for path in sorted(versions):
            if path in taken or path in sent or not taken.isdisjoint(parents(path)):
                self.hidden += versions[path]
                continue
            taken.add(path)
            latest = max(versions[path], key=lambda o: (o.mtime_ns, o.snapshot.number))
            self.shown[path] = latest
            for output in versions[path]:
                (self.settled if output.mark == latest.mark else self.hidden).append(output)
        modes: dict[bytes, int] = {}
        for snapshot in snapshots:
            for path, mode in snapshot.folders.items():
                if path not in taken and taken.isdisjoint(parents(path)):
                    modes.setdefault(path, mode)
        # Folders that contain an output, and folders that a job created, even if empty.
        wanted = {parent for path in self.shown for parent in parents(path)}
        if current is not None:
            wanted |= set(current.folders) - set(current.tree.folders) - sent
        self.folders = {path: mode for path, mode in sorted(modes.items()) if path in wanted}

    def show_in(self, root: bytes) -> list[Output]:
        """Show the outputs in the snapshot at ``root``. Returns those that the file system cannot
        link."""
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


def hidden_notices(outputs: list[Output], only: Snapshot | None, why: str) -> list[str]:
    """A notice for the outputs that the new snapshot does not show; only those of the snapshot
    ``only`` if given, because earlier syncs have reported the rest."""
    new = [output for output in outputs if only is None or output.snapshot is only]
    paths = [os.path.join(output.snapshot.path, output.path) for output in new]
    if not paths:
        return []
    more = " and %d more" % (len(paths) - SHOWN) if len(paths) > SHOWN else ""
    listed = ", ".join(printable(path) for path in sorted(paths)[:SHOWN])
    return ["kept where the job wrote it, because %s: %s%s" % (why, listed, more)]


def settle(current: Snapshot, carried: CarriedOutputs) -> None:
    """Note in older snapshots which of their outputs ``current`` shows."""
    changed: set[Snapshot] = set()
    for output in carried.settled:
        if output.snapshot.root != current.root and not output.settled:
            output.snapshot.settled[text(output.path)] = output.signature
            changed.add(output.snapshot)
    for snapshot in changed:
        snapshot.save()
