"""The sync program: from the request to the answer."""

from __future__ import annotations

import os
import shutil
import signal
import sys

from dtrain.node.agent.wire import raw, text
from dtrain.node.sync.channel import Channel
from dtrain.node.sync.errors import (
    LauncherGoneError,
    SyncRefusedError,
    explain,
    full_disk_explained,
)
from dtrain.node.sync.manifest import Manifest
from dtrain.node.sync.outputs import CarriedOutputs, hidden_notices, settle
from dtrain.node.sync.receive import receive
from dtrain.node.sync.snapshots import Snapshot, discard
from dtrain.node.sync.store import SnapshotStore
from dtrain.node.sync.usage import delete_unused, machine, unused_here
from dtrain.node.trust import Trust, UnsafeError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from io import BufferedReader
    from typing import Any

    from dtrain.node.importer import Importer
    from dtrain.node.sync.store import StoreLock


def synchronize(channel: Channel, request: dict[str, Any]) -> dict[str, Any]:
    """Make WORKDIR show the launcher's tree. Returns the answer for the launcher."""
    tree = Manifest(request["tree"])
    place = SnapshotStore(request["workdir"], Trust(request["trust_group"]))
    with place.locked(float(request["patience"])) as lock:
        name = place.check()
        place.sweep()
        snapshots = place.snapshots(name)
        # Before the search for outputs, so that a process that writes later is seen running.
        idle = unused_here(snapshots, float(request["grace"]))
        for snapshot in snapshots:
            snapshot.examine()
            lock.beat()
        current = next((s for s in snapshots if s.name == name), None)
        # Early, so that the files deleted on a full disk make room now.
        gone = delete_unused(place, [snapshot for snapshot in idle if snapshot is not current])
        snapshots = [snapshot for snapshot in snapshots if snapshot not in gone]
        carried = CarriedOutputs(snapshots, current, tree)
        notices: list[str] = []
        fresh = current is None or not (
            current.pristine
            and current.tree.digest == tree.digest
            and all(output.snapshot is current for output in carried.shown.values())
        )
        if current is None or fresh:
            current, carried, notices = take(channel, lock, place, tree, current, snapshots)
        else:
            channel.answer({"type": "want", "indices": []})
            current.give(machine())
        settle(current, carried)
        delete_unused(place, [s for s in idle if s not in gone and s.root != current.root])
        place.check_moved()
        return {"type": "done", "path": text(current.path), "new": fresh, "notices": notices}


def take(
    channel: Channel,
    lock: StoreLock,
    place: SnapshotStore,
    tree: Manifest,
    before: Snapshot | None,
    snapshots: list[Snapshot],
) -> tuple[Snapshot, CarriedOutputs, list[str]]:
    """Receive the launcher's tree as a new snapshot, and make it the current one in place of
    ``before``. Returns it, the outputs that it shows, and notices for the user."""
    name = b"%d-%s" % (place.next_number(), raw(tree.digest[:12]))
    root = place.temporary("incoming")
    try:
        with full_disk_explained(place.container):
            receive(channel, lock, tree, before, root)
            # Again: receiving may have taken long, and jobs continue to write.
            for snapshot in snapshots:
                snapshot.examine()
            carried = CarriedOutputs(snapshots, before, tree)
            refused = carried.show_in(root)
            later = "a sent file or a later one is there"
            notices = hidden_notices(carried.hidden, before, later)
            notices += hidden_notices(refused, None, "the file system cannot link it")
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
    return current, carried, notices


def main(stream: BufferedReader, importer: Importer) -> None:
    os.umask(0o077)
    channel = Channel(stream, sys.stdout.buffer)

    def give_up(number: int, frame: Any) -> None:
        raise LauncherGoneError

    for number in (signal.SIGALRM, signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, give_up)
    folder = b""
    try:
        channel.greet()
        request = channel.request()
        folder = raw(request["workdir"])
        try:
            answer = synchronize(channel, request)
        except SyncRefusedError as refused:
            answer = refused.reply
        except UnsafeError as error:
            answer = SyncRefusedError(error.reason, error.hint("`job.workdir`")).reply
        except OSError as error:
            answer = explain(error, folder).reply
        channel.answer(answer)
    except (LauncherGoneError, BrokenPipeError):
        sys.exit(1)
