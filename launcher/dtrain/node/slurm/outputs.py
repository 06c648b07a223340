"""Sends the output of a Slurm job from files in a shared folder."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import time

from dtrain.launchplan.names import rank_name
from dtrain.node.agent.launcher_channel import LauncherChannel
from dtrain.node.agent.wire import CHUNK, shown
from dtrain.node.agent.worker_files import GrowingFile, open_regular, size_of
from dtrain.node.descriptors import closing_fd
from dtrain.node.files import listed

STREAM = re.compile(rb"([a-z]+)-(0|[1-9][0-9]{0,8})\.(?:out|err)")
LIST_SECONDS = 1.0
"""Seconds between two looks for new files."""


class StreamFile(GrowingFile):
    """One output file of a stream, which begins at ``base`` of the stream."""

    def __init__(self, number: int, offset: int, base: int, host: str, name: str) -> None:
        super().__init__(number, offset)
        self.base = base
        self.size = -1
        """Of the file when it was opened last."""
        self.host = host
        self.name = name

    @property
    def end(self) -> int:
        """How far the stream has been read."""
        return self.base + self.offset


class Outputs:
    """The output files of a run, each read from an offset on: ``<folder>/<host>/worker-0.out``."""

    def __init__(
        self,
        folder: bytes,
        offsets: dict[str, dict[str, int]],
        roles: dict[str, int],
        torchruns: dict[str, tuple[int, int]],
        channel: LauncherChannel,
    ) -> None:
        """``roles``: the number of processes of each role. ``torchruns``: the first rank and the
        number of ranks of each torchrun."""
        self._folder = folder
        self._roles = roles
        self._offsets = offsets
        self._torchruns = torchruns
        self._channel = channel
        self._files: dict[bytes, StreamFile] = {}
        self._latest: dict[tuple[str, str], bytes] = {}
        self._list_at = 0.0
        self.names: dict[bytes, list[bytes]] = {}
        """What is in the folder of each host. Made anew once a second: on a busy shared folder,
        each listing takes long."""

    def send(self, *, last: bool) -> int:
        """Send new data, at most `CHUNK` bytes of each file. Returns the bytes of the longest
        piece: if it is shorter, there is no more now. ``last``: open every file, because a shared
        folder may know the size only then."""
        now = time.monotonic()
        if last or now >= self._list_at:
            self._list_at = now + LIST_SECONDS
            self._find()
        longest = 0
        for path, file in list(self._files.items()):
            longest = max(longest, self._send(path, file, last))
        return longest

    def any(self) -> bool:
        """Whether a machine has written something; looks every few seconds."""
        now = time.monotonic()
        if now < self._list_at:
            return False
        self._list_at = now + LIST_SECONDS
        paths = [os.path.join(self._folder, name) for name in listed(self._folder)]
        return any(map(os.path.isdir, paths))

    def _find(self) -> None:
        self.names = {
            host: listed(os.path.join(self._folder, host)) for host in listed(self._folder)
        }
        for host, names in self.names.items():
            place = os.path.join(self._folder, host)
            for name in names:
                found = STREAM.fullmatch(name)
                # A program may keep files of its own there.
                if found and int(found[2]) < self._roles.get(found[1].decode(), 0):
                    self._add(
                        os.path.join(place, name), shown(host), name.decode(), continued=False
                    )
                elif name.endswith(b".ranks"):
                    ranks = self._ranks_of(os.path.join(place, name))
                    last = {stream: path for path, stream in ranks}
                    for path, stream in ranks:
                        self._add(path, shown(host), stream, continued=path != last[stream])

    def _ranks_of(self, folder: bytes) -> list[tuple[bytes, str]]:
        """The output files of torchrun's ranks, the oldest first, each with its stream's name:
        ``<run>/attempt_<n>/<local rank>/stdout.log``."""
        first, count = self._torchruns.get(
            shown(os.path.basename(folder)[: -len(b".ranks")]), (0, 0)
        )
        found: list[tuple[float, bytes, str]] = []
        for path in glob.glob(
            os.path.join(glob.escape(folder), b"*", b"attempt_*", b"*", b"std*.log")
        ):
            local, log = path.split(b"/")[-2:]
            suffix = {b"stdout.log": ".out", b"stderr.log": ".err"}.get(log)
            if suffix and local.isdigit() and len(local) <= 6 and int(local) < count:
                with contextlib.suppress(OSError):
                    began = os.stat(os.path.dirname(os.path.dirname(path))).st_mtime
                    found.append((began, path, rank_name(first + int(local)) + suffix))
        return [(path, stream) for _, path, stream in sorted(found)]

    def _add(self, path: bytes, host: str, name: str, *, continued: bool) -> None:
        """Send a file from now on. A restarted torchrun writes new files: they continue the stream
        of the last attempt's files, once these are sent. ``continued``: whether there is a newer
        file."""
        if path in self._files:
            return
        base, latest = 0, self._latest.get((host, name))
        if latest is not None:
            before = self._files[latest]
            if size_of(latest) > before.offset:
                return
            base = before.end
        offset = max(0, self._offsets.get(host, {}).get(name, 0) - base)
        with contextlib.suppress(OSError):
            number, size = len(self._files) + 1, os.stat(path).st_size
            if continued:  # what is stored may be from that one, too
                offset = min(offset, size)
            self._files[path] = StreamFile(number, offset, base, host, name)
            self._latest[host, name] = path
            self._channel.report("stream", id=number, host=host, name=name)

    def _send(self, path: bytes, file: StreamFile, last: bool) -> int:
        try:
            size = os.stat(path).st_size
            if not last and size <= file.offset and size == file.size:
                return 0
            # Opened for each piece: there may be more files than a process may have open.
            with closing_fd(open_regular(path)) as fd:
                data = os.pread(fd, CHUNK, file.offset)
                file.size = os.fstat(fd).st_size
        except OSError:
            return 0
        if data:
            self._channel.send_data(file.number, file.end, data)
            file.offset += len(data)
        elif file.is_truncated(file.size):
            self._channel.report("notice", host=file.host, text=file.truncation(file.name))
        return len(data)
