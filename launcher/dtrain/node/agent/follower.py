"""Sends new data in the files of a run: events, progress and the workers' output."""

from __future__ import annotations

import contextlib
import os
import time

from dtrain.launchplan.names import process_name, rank_name
from dtrain.node.agent.progress import ProgressFiles
from dtrain.node.agent.wire import CHUNK, raw, shown
from dtrain.node.agent.worker_files import GrowingFile, open_regular
from dtrain.node.telemetry.follow import TelemetryFiles

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dtrain.node.agent.commands import LaunchRequest
    from dtrain.node.agent.events import EventReader
    from dtrain.node.agent.launcher_channel import LauncherChannel

PROGRESS_SECONDS = 0.1
"""Between two reads of the progress files."""


class OutputFile(GrowingFile):
    """A file with a worker's output."""

    def __init__(self, number: int, path: bytes, offset: int, fd: int) -> None:
        """``fd`` is the file if it is already open, else -1."""
        super().__init__(number, offset)
        self.path = path
        self._fd = fd

    def read(self) -> bytes:
        """The next bytes; empty if there are none yet."""
        try:
            if self._fd < 0:
                self._fd = open_regular(self.path)
            return os.pread(self._fd, CHUNK, self.offset)
        except OSError:
            return b""

    def size(self) -> int:
        """Its size, or `offset` if that is unknown."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):  # such as a file that its server has removed
                return os.fstat(self._fd).st_size
        return self.offset


class Follower:
    """The files of one run, each read from an offset on."""

    def __init__(
        self,
        folder: bytes,
        channel: LauncherChannel,
        events: EventReader,
        interval: float,
        *,
        offsets: dict[str, int] | None = None,
        events_only: bool = False,
    ) -> None:
        """``interval``: seconds between two reads of the workers' output, less while there is
        much of it. ``offsets``: for a launcher that attaches, where it wants each stream to
        continue; one that is missing starts at its beginning."""
        self._folder = folder
        self._channel = channel
        self._events = events
        self._interval = interval
        self._events_only = events_only
        self._offsets = offsets or {}
        self._outputs_at = 0.0
        self._progress = ProgressFiles(folder, self._offsets, attached=offsets is not None)
        self._progress_at = 0.0
        self._telemetry = TelemetryFiles(folder, self._offsets.get("telemetry", 0))
        self._outputs: dict[bytes, int] = {}
        self._streams: list[OutputFile] = []
        self.ended = False
        """Whether the last event was read."""
        self.survived = False
        """Whether it names processes that survived the end of the run."""
        self.has_more = False
        """Whether a worker has written more than the last call has sent."""

    def send_events(self) -> bool:
        """Send new events. Like the other methods, returns whether there was new data."""
        begun = self._events.offset
        for event, end in self._events.read():
            if event["event"] == "started":
                name = process_name(event["role"], event["index"])
                path = os.path.join(self._folder, raw(name))
                self._add(name, path + b".out", path + b".err")
            elif event["event"] == "rank":
                with contextlib.suppress(UnicodeEncodeError):  # a forged event
                    place = os.path.join(self._folder, raw(event["logs"]))
                    paths = os.path.join(place, b"stdout.log"), os.path.join(place, b"stderr.log")
                    self._add(rank_name(event["rank"]), *paths)
            elif event["event"] == "ended":
                self.ended, self.survived = True, bool(event.get("survivors"))
            if end > self._offsets.get("events", 0):
                self._channel.report("event", offset=end, event=event)
        return self._events.offset > begun

    def send_outputs(self, over: bool) -> bool:
        """Send new data in the workers' files; ``over`` if there will be no more."""
        found = not self._events_only and self._send_progress(over)
        found |= not self._events_only and self._send_telemetry(over)
        now = time.monotonic()
        if now < self._outputs_at and not over:
            return found
        self._outputs_at = now + self._interval
        self.has_more = False
        for stream in self._streams:
            found |= self._send_stream(stream)
        return found

    def open_outputs(self, command: LaunchRequest) -> None:
        """Open the output files before workers can remove them."""
        for process in command["processes"]:
            name = process_name(process["role"], process["index"])
            for suffix in (".out", ".err"):
                path = os.path.join(self._folder, raw(name + suffix))
                with contextlib.suppress(OSError):
                    self._outputs[path] = open_regular(path)

    def _send_progress(self, over: bool) -> bool:
        """Send what workers have reported through `dtrain.runtime` since the last call."""
        now = time.monotonic()
        if now < self._progress_at and not over:
            return False
        self._progress_at = now + max(PROGRESS_SECONDS, self._interval)
        for name, end, report in self._progress.read(over):
            self._channel.report("progress", name=name, offset=end, said=report)
        for notice in self._progress.notices:
            self._channel.report("notice", text=notice)
        self._progress.notices.clear()
        return self._progress.advanced

    def _send_telemetry(self, over: bool) -> bool:
        found = False
        for kind, sample in self._telemetry.read(over):
            self._channel.report(kind, said=sample)
            found = True
        return found and over  # otherwise no reason to read the other files more often

    def _add(self, process: str, out: bytes, err: bytes) -> None:
        """Send the output files of a process or rank from now on."""
        if self._events_only:
            return
        for name, path in ((process + ".out", out), (process + ".err", err)):
            offset, opened = self._offsets.get(name, 0), self._outputs.pop(path, -1)
            stream = OutputFile(len(self._streams) + 1, path, offset, opened)
            self._streams.append(stream)
            self._channel.report("stream", id=stream.number, name=name)

    def _send_stream(self, stream: OutputFile) -> bool:
        data = stream.read()
        if data:
            self._channel.send_data(stream.number, stream.offset, data)
            stream.offset += len(data)
        elif stream.is_truncated(stream.size()):
            name = shown(os.path.relpath(stream.path, self._folder))
            self._channel.report("notice", text=stream.truncation(name))
        if len(data) == CHUNK:
            self._outputs_at, self.has_more = 0.0, True
        return bool(data)
