"""Stores the output of a job's processes, which arrives over one connection."""

from __future__ import annotations

from collections import Counter

from dtrain.launchplan import names
from dtrain.launchplan.plan import LaunchPlan
from dtrain.messages.agent import StreamFound
from dtrain.messages.decode import ProtocolError, excerpt
from dtrain.node import protocol
from dtrain.runs.folder import RunFolder
from dtrain.runs.log_store import LogWriter, Stream

MAX_STREAMS = 200_000


class JobOutput:
    def __init__(self, folder: RunFolder, plan: LaunchPlan) -> None:
        self._folder = folder
        self._ranked = plan.job.ranked
        self._processes = [[process.name for process in part.processes] for part in plan.hosts]
        self._expected = {name for part in self._processes for name in part}
        for first, count in torchruns(plan).values():
            self._expected |= {names.rank_name(rank) for rank in range(first, first + count)}
        self._hosts: dict[str, str] = {}
        self._streams: dict[int, LogWriter] = {}

    def begin_connection(self) -> None:
        """A new connection numbers its streams from 1."""
        self._streams.clear()

    def add(self, host: str, found: StreamFound) -> None:
        """Open a stream. Raises ProtocolError if it is not one of this job's, and StorageError if
        this machine cannot store it."""
        process = found.name.rpartition(".")[0]
        if process not in self._expected or found.id in self._streams:
            raise ProtocolError(f"stream: unexpected {excerpt(found.name)}")
        if len(self._streams) >= MAX_STREAMS:
            raise ProtocolError("stream: too many")
        try:
            stream = self._folder.stream(host, found.name, ranked=self._ranked)
        except ValueError as error:
            raise ProtocolError(f"stream: {error}") from None
        self._streams[found.id] = LogWriter(stream)
        self._hosts[process] = host

    def keep(self, frame: protocol.Data) -> tuple[Stream, int]:
        """Store a piece of output. Returns its stream and the stream's size. Raises ProtocolError
        and StorageError."""
        if frame.stream not in self._streams:
            raise ProtocolError(f"data of an unknown stream ({frame.stream})")
        writer = self._streams[frame.stream]
        return writer.stream, writer.append(frame.offset, frame.payload)

    def hosts(self) -> tuple[str, ...]:
        """The hosts of the job in the plan's order, or nothing while one has no output file."""
        found = [
            next((self._hosts[name] for name in own if name in self._hosts), "")
            for own in self._processes
        ]
        return tuple(found) if all(found) else ()


def roles(plan: LaunchPlan) -> dict[str, int]:
    """The number of processes of each role."""
    return Counter(process.role for part in plan.hosts for process in part.processes)


def torchruns(plan: LaunchPlan) -> dict[str, tuple[int, int]]:
    """The first rank and the number of ranks of each torchrun."""
    found: dict[str, tuple[int, int]] = {}
    first = 0
    for part in plan.hosts:
        for process in part.processes:
            if process.role == "torchrun":
                found[process.name] = first, process.ranks
            first += process.ranks
    return found
