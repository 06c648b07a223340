"""Stores the output of one host's workers and counts what has arrived."""

from __future__ import annotations

from dtrain.messages import agent as messages
from dtrain.messages.decode import ProtocolError
from dtrain.node import protocol
from dtrain.runs.folder import RunFolder
from dtrain.runs.log_store import LogWriter, Stream
from dtrain.runs.storage import StorageError

MAX_OFFSETS = 10_000
"""Maximum files of a host with a stored offset: a hostile host could send any number."""


class HostOutput:
    def __init__(self, host: str, folder: RunFolder, *, ranked: bool) -> None:
        self.offsets: dict[str, int] = {}
        """Bytes that have arrived, by file. Includes ``events`` and progress files. For
        ``telemetry``, the time of the last average."""
        self._host = host
        self._folder = folder
        self._ranked = ranked
        self._streams: dict[int, LogWriter] = {}
        self._full = False

    def begin_relay(self) -> None:
        """A new relay starts. It numbers its streams from 1."""
        self._streams.clear()

    def add(self, found: messages.StreamFound) -> None:
        """Open a stream. Raises ProtocolError if it is already open, StorageError if this machine
        cannot store it."""
        if found.id in self._streams:
            raise ProtocolError(f"stream: {found.id} was announced before")
        stream = self._folder.stream(self._host, found.name, ranked=self._ranked)
        try:
            self._streams[found.id] = LogWriter(stream, arrived=self.offsets.get(found.name, 0))
        except StorageError:
            self._full = True
            raise

    def keep(self, frame: protocol.Data) -> tuple[Stream, int] | None:
        """Store a piece of output. Returns its stream and the stream's size if the data is new.
        Raises ProtocolError, and StorageError once; later output is dropped."""
        if self._full:
            return None
        if frame.stream not in self._streams:
            raise ProtocolError(f"data of an unknown stream ({frame.stream})")
        writer = self._streams[frame.stream]
        before = writer.size
        try:
            size = writer.append(frame.offset, frame.payload)
        except StorageError:
            self._full = True
            raise
        self.offsets[writer.path.name] = size
        return (writer.stream, size) if size > before else None

    def note(self, name: str, offset: int) -> None:
        """Store how much of another file has arrived."""
        if len(self.offsets) < MAX_OFFSETS or name in self.offsets:
            self.offsets[name] = offset
