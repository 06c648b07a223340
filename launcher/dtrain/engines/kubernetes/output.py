"""Stores the output of a run's pods, and how far each log has been read."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

from dtrain.diagnostics import UsageError
from dtrain.engines.kubernetes.lines import ProcessEnd, ProcessLine, labelled
from dtrain.launchplan.plan import HostPlan
from dtrain.messages.decode import Length, ProtocolError, Range, decode, parse_object
from dtrain.runs.log_store import LogWriter, RunFolder, Stream, storage_error
from dtrain.runs.stored_file import open_stored, unreadable

FILE = "pods.json"
SCHEMA = 1
MAX_BYTES = 1 << 26
_WORDS = 20
"""Lines of a pod, without the name of a process, that a report shows."""


@dataclass(slots=True)
class Position:
    """How far the log of a pod has been stored."""

    last: Annotated[int, Range(-1, 1 << 63)] = -1
    """Time of the last line, in nanoseconds since the epoch; -1 before the first."""
    count: Annotated[int, Range(0, 1 << 40)] = 0
    """Lines with this time."""
    sizes: dict[Annotated[str, Length(100)], Annotated[int, Range(0, 1 << 50)]] = field(
        default_factory=dict
    )
    """Bytes of each stream that come before the next line."""


class Positions:
    """The positions of all pods of a run, kept in its folder."""

    def __init__(self, folder: Path) -> None:
        """Raises UsageError if the folder has a file that this version cannot read."""
        self._path = folder / FILE
        self.pods: dict[str, Position] = {}
        try:
            with os.fdopen(open_stored(self._path, os.O_RDONLY), "rb") as file:
                data = file.read(MAX_BYTES + 1)
            if len(data) > MAX_BYTES:
                raise ProtocolError(f"larger than {MAX_BYTES >> 20} MiB")
            body = parse_object(data)
            if body.get("schema") != SCHEMA:
                raise UsageError(f"{self._path}: written by another version of dtrain")
            self.pods = decode(dict[str, Position], body.get("pods"), "pods")
        except FileNotFoundError:
            pass
        except OSError as error:
            raise unreadable(self._path, error) from None
        except ProtocolError as error:
            raise UsageError(f"{self._path}: cannot be read: {error}") from None

    def save(self) -> None:
        """Readers never see half of the file. Raises StorageError."""
        draft = self._path.with_name(f".{FILE}")
        try:
            draft.unlink(missing_ok=True)
            fd = open_stored(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            with os.fdopen(fd, "w") as file:
                pods = {uid: asdict(position) for uid, position in self.pods.items()}
                json.dump({"schema": SCHEMA, "pods": pods}, file)
            draft.replace(self._path)
        except OSError as error:
            raise storage_error(self._path, error) from None


class PodOutput:
    """The output of one pod, in a stream for each process."""

    def __init__(
        self, folder: RunFolder, part: HostPlan, position: Position, *, ranked: bool
    ) -> None:
        """``folder``: that of the pod's attempt. Raises StorageError."""
        self.position = position
        self.ends: list[ProcessEnd] = []
        self.words: deque[str] = deque(maxlen=_WORDS)
        """The last lines without the name of a process: of the script itself."""
        self._writers: dict[str, tuple[LogWriter, Stream]] = {}
        self._first = part.processes[0].name
        for process in part.processes:
            for suffix in ("out", "err"):
                name = f"{process.name}.{suffix}"
                stream = folder.stream(
                    part.host.name,
                    name,
                    role=process.role,
                    index=process.index,
                    rank=process.rank if ranked else None,
                )
                writer = LogWriter(stream)
                self._writers[name] = writer, stream
                known = position.sizes.get(name, writer.size)
                # A file that someone has cut off goes on at its end.
                position.sizes[name] = min(known, writer.size)

    def keep(self, lines: Iterable[bytes], last: int, count: int) -> Mapping[Stream, int]:
        """Store lines. ``last`` and ``count``: the position after them. Returns the sizes of the
        streams that have grown. Raises StorageError."""
        pieces: dict[str, list[bytes]] = {}
        for text in lines:
            match found := labelled(text.rstrip(b"\n")):
                case ProcessLine(process, stderr, line):
                    name = f"{process}.{'err' if stderr else 'out'}"
                    if name in self._writers:
                        pieces.setdefault(name, []).append(line + b"\n")
                        continue
                case ProcessEnd():
                    if f"{found.process}.out" in self._writers:
                        self.ends.append(found)
                        continue
            self.words.append(text.decode(errors="replace").rstrip("\n"))
            pieces.setdefault(f"{self._first}.err", []).append(text.rstrip(b"\n") + b"\n")
        grown = {}
        for name, parts in pieces.items():
            writer, stream = self._writers[name]
            data = b"".join(parts)
            size = writer.append(self.position.sizes[name], data)
            self.position.sizes[name] += len(data)
            grown[stream] = size
        self.position.last, self.position.count = last, count
        return grown
