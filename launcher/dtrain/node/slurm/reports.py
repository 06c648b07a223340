"""Sends what the workers of a job report through `dtrain.runtime`, and when they end."""

from __future__ import annotations

import contextlib
import os
import re

from dtrain.node.agent.progress import ProgressFiles
from dtrain.node.agent.wire import shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dtrain.node.agent.launcher_channel import LauncherChannel

ENDED = re.compile(rb"([0-9]{1,6})\.ended")
"""A file that Slurm writes after a task of the main step, see ``job.sbatch``."""


class SlurmWorkerReports:
    def __init__(self, folder: bytes, attached: bool, channel: LauncherChannel) -> None:
        """``folder`` is that of the attempt. ``attached``: begin with the last report of each
        process."""
        self._folder = folder
        self._attached = attached
        self._channel = channel
        self._hosts: dict[bytes, ProgressFiles] = {}
        self._ended: set[bytes] = set()
        self._names: dict[bytes, list[bytes]] = {}

    def send(self, names: dict[bytes, list[bytes]], *, last: bool) -> None:
        """Send new reports. ``names`` is what `Outputs` has found in the folder of each host:
        nothing is read until it has looked again."""
        if names is self._names:
            return
        self._names = names
        for host, found in names.items():
            place = os.path.join(self._folder, host)
            if host not in self._hosts:
                self._hosts[host] = ProgressFiles(place, {}, self._attached)
            for name, offset, report in self._hosts[host].read(last, found):
                self._channel.report(
                    "progress", host=shown(host), name=name, offset=offset, said=report
                )
            self._send_ends(host, place, found)

    def _send_ends(self, host: bytes, place: bytes, names: list[bytes]) -> None:
        for name in names:
            number = ENDED.fullmatch(name)
            if number and name not in self._ended:
                with contextlib.suppress(OSError):
                    then = os.lstat(os.path.join(place, name)).st_mtime
                    self._channel.report("ended", host=shown(host), task=int(number[1]), time=then)
                    self._ended.add(name)
