"""Sends what the workers of a job report through `dtrain.runtime`, and when they end."""

from __future__ import annotations

import contextlib
import os
import re
import time

from dtrain.node.agent.progress import ProgressFiles
from dtrain.node.agent.wire import shown
from dtrain.node.files import listed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dtrain.node.agent.launcher_channel import LauncherChannel

ENDED = re.compile(rb"([0-9]{1,6})\.ended")
"""A file that Slurm writes after a task of the main step, see ``job.sbatch``."""
SECONDS = 1.0
"""Between two reads: the files are in a folder that all machines share."""


class SlurmWorkerReports:
    def __init__(self, folder: bytes, attached: bool, channel: LauncherChannel) -> None:
        """``folder`` is that of the attempt. ``attached``: begin with the last report of each
        process."""
        self._folder = folder
        self._attached = attached
        self._channel = channel
        self._hosts: dict[bytes, ProgressFiles] = {}
        self._ended: set[bytes] = set()
        self._due = 0.0

    def send(self, *, last: bool) -> None:
        """Send new reports. ``last``: at once."""
        if time.monotonic() < self._due and not last:
            return
        self._due = time.monotonic() + SECONDS
        for host in listed(self._folder):
            place = os.path.join(self._folder, host)
            if host not in self._hosts:
                if not os.path.isdir(place):
                    continue
                self._hosts[host] = ProgressFiles(place, {}, self._attached)
            for name, offset, report in self._hosts[host].read(last):
                self._channel.report(
                    "progress", host=shown(host), name=name, offset=offset, said=report
                )
            self._send_ends(host, place)

    def _send_ends(self, host: bytes, place: bytes) -> None:
        for name in listed(place):
            number = ENDED.fullmatch(name)
            if number and name not in self._ended:
                with contextlib.suppress(OSError):
                    then = os.lstat(os.path.join(place, name)).st_mtime
                    self._channel.report("ended", host=shown(host), task=int(number[1]), time=then)
                    self._ended.add(name)
