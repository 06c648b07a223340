"""The watcher of a pod: a program beside the job's own, in its container.

It reads the orders of `dtrain.node.pods.orders`, and writes the frames of `dtrain.node.agent.wire`
with the messages of `dtrain.node.watcher`, and with these:

    progress   name, offset, said: a report through `dtrain.runtime`, as an agent sends it
    wrote      the workers have written output
    notice     text: a problem with the reports
    alive      the answer to ``ping``
    bye        the last message

It ends with its input, or with TERM from the pod's script, which then waits for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading

from dtrain.node.agent.launcher_channel import LauncherChannel
from dtrain.node.agent.processes import send
from dtrain.node.agent.progress import ProgressFiles
from dtrain.node.agent.wire import PREAMBLE, raw
from dtrain.node.descriptors import closing_fd
from dtrain.node.files import listed
from dtrain.node.watcher import Watcher

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import BinaryIO

    from dtrain.node.importer import Importer
    from dtrain.node.pods.orders import PodOrder, WatchPod

PERIOD = 0.5
"""Seconds between two looks at what the workers have written."""
PID_FILE = b"watcher.pid"
"""In the folder of the attempt, for the pod's script."""


class Reports(threading.Thread):
    """Sends what the workers report, and that they write output."""

    def __init__(self, folder: bytes, order: WatchPod, channel: LauncherChannel) -> None:
        super().__init__(daemon=True)
        self._folder = folder
        self._progress = ProgressFiles(folder, order["offsets"], order["attached"])
        self._channel = channel
        self._written = self._last_write()
        self._introduced = False
        """Whether the pod's script can find this program."""
        self._ending = threading.Event()

    def run(self) -> None:
        while True:
            self._introduced = self._introduced or introduce(self._folder)
            if self._ending.wait(PERIOD):
                break
            self._send(last=False)
        self._send(last=True)

    def end(self) -> None:
        """Send the last reports."""
        self._ending.set()
        self.join()

    def _send(self, *, last: bool) -> None:
        for name, offset, report in self._progress.read(last):
            self._channel.report("progress", name=name, offset=offset, said=report)
        for text in self._progress.notices:
            self._channel.report("notice", text=text)
        self._progress.notices.clear()
        before, self._written = self._written, self._last_write()
        if self._written != before:
            self._channel.report("wrote")

    def _last_write(self) -> float:
        """When a worker last wrote to a pipe of the script: each write changes its time."""
        times = [0.0]
        for name in listed(self._folder):
            if name.endswith((b".out", b".err")):
                with contextlib.suppress(OSError):
                    times.append(os.lstat(os.path.join(self._folder, name)).st_mtime)
        return max(times)


def obey(order: PodOrder, watcher: Watcher, channel: LauncherChannel) -> None:
    if order["op"] == "ping":
        channel.report("alive")
    elif order["op"] == "stacks":
        watcher.diagnose(abort=order["abort"], ras=order["ras"])
    elif order["op"] == "kill":
        ranks = [proc for _, proc in watcher.running()]
        for proc in [*ranks, *(proc for _, _, proc in watcher.started())]:
            send(proc, signal.SIGKILL)


def introduce(folder: bytes) -> bool:
    """Write the number of this process. Returns false if the script has not made the folder yet."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    path = os.path.join(folder, PID_FILE)
    with contextlib.suppress(OSError), closing_fd(os.open(path, flags, 0o600)) as fd:
        return os.write(fd, b"%d\n" % os.getpid()) > 0
    return False


def main(stream: BinaryIO, importer: Importer) -> None:
    channel = LauncherChannel()
    channel.write(PREAMBLE)
    line = stream.readline()
    if line:
        first: WatchPod = json.loads(line)
        folder = raw(first["folder"])
        watcher = Watcher(folder, first["world_size"], channel.report)
        reports = Reports(folder, first, channel)
        with watcher.watching():
            reports.start()
            for line in iter(stream.readline, b""):
                obey(json.loads(line), watcher, channel)
        reports.end()
    channel.report("bye")
    os._exit(0)
