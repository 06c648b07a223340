"""Stores the output of a run's pods, and how far each log has been read."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, field, replace
from pathlib import Path
from typing import Annotated, Any

from dtrain.engines.kubernetes.lines import ProcessEnd, ProcessLine, ScriptLine, labelled
from dtrain.engines.kubernetes.reading import PodLines
from dtrain.launchplan.plan import HostPlan
from dtrain.messages.decode import Length, Range, decode
from dtrain.records import dataclass
from dtrain.runs.folder import RunFolder
from dtrain.runs.log_store import LogWriter, Stream
from dtrain.runs.storage import storing
from dtrain.runs.stored_file import read_object, write_object

FILE = "pods.json"
SCHEMA = 1
MAX_BYTES = 1 << 26
_WORDS = 20
"""Lines of a pod, without the name of a process, that a report shows."""


@dataclass(slots=True)
class LogPosition:
    """How far the log of a pod has been stored."""

    last: Annotated[int, Range(-1, 1 << 63)] = -1
    """Time of the last line, in nanoseconds since the epoch; -1 before the first."""
    count: Annotated[int, Range(0, 1 << 40)] = 0
    """Lines with this time."""
    latest: Annotated[int, Range(-1, 1 << 63)] = -1
    """The latest time of a line. A clock that steps back makes it later than `last`."""
    sizes: dict[Annotated[str, Length(100)], Annotated[int, Range(0, 1 << 50)]] = field(
        default_factory=dict
    )
    """Bytes of each stream that come before the next line."""
    ends: tuple[ProcessEnd, ...] = ()
    """The processes that have ended. Their lines are not read again."""
    deleted: bool = False
    """Whether the script has written that its pod is deleted."""
    whole: bool = False
    """Whether the script has written its last line."""


class LogPositions:
    """The positions of all pods of a run, kept in its folder."""

    def __init__(self, folder: Path) -> None:
        """Raises UsageError if the folder has a file that this version cannot read."""
        self._path = folder / FILE
        stored = read_object(self._path, SCHEMA, MAX_BYTES, _read_positions)
        self.pods: dict[str, LogPosition] = stored or {}
        self._has_new = False

    def of(self, uid: str) -> LogPosition:
        """The position of a pod."""
        self._has_new |= uid not in self.pods
        return self.pods.setdefault(uid, LogPosition())

    def save_new(self) -> None:
        """Save the positions of all new pods at once: before their first line, so that no line is
        stored twice. Raises StorageError."""
        if self._has_new:
            self.save()

    def save(self) -> None:
        """Readers never see half of the file. Raises StorageError.

        Durable, because some file systems would leave an empty file if the machine crashes, and no
        process could follow the run any more.
        """
        pods = {uid: asdict(position) for uid, position in self.pods.items()}
        with storing(self._path):
            write_object(self._path, {"schema": SCHEMA, "pods": pods}, durable=True)
        self._has_new = False


def _read_positions(body: Mapping[str, Any]) -> dict[str, LogPosition]:
    return decode(dict[str, LogPosition], body.get("pods"), "pods")


class PodOutput:
    """The output of one pod, in a stream for each process."""

    def __init__(
        self, folder: RunFolder, part: HostPlan, position: LogPosition, *, ranked: bool
    ) -> None:
        """``folder``: that of the pod's attempt. Raises StorageError."""
        self.position = position
        self.words: deque[str] = deque(maxlen=_WORDS)
        """The last lines without the name of a process: of the script itself."""
        self._writers: dict[str, LogWriter] = {}
        self._first = part.processes[0].name
        for process in part.processes:
            for suffix in ("out", "err"):
                name = f"{process.name}.{suffix}"
                writer = LogWriter(folder.stream(part.host.name, name, ranked=ranked))
                self._writers[name] = writer
                known = position.sizes.get(name, writer.size)
                # A file that someone has cut off goes on at its end.
                position.sizes[name] = min(known, writer.size)

    def lacks(self, new: PodLines) -> bool:
        """Whether lines before these are missing, for example because the container was started
        again and has a new log."""
        first = labelled(new.lines[0].rstrip(b"\n"))
        # Without a label: what a runtime writes that cannot start the script.
        begins = self.position.last < 0 and first is not None
        return (new.gap or begins) and first is not ScriptLine.BEGIN

    def skip(self) -> None:
        """Lines are missing, maybe also some that are stored here and come after the position: what
        follows begins at the end of each stream, and with a line of its own. Raises
        StorageError."""
        for name, writer in self._writers.items():
            if writer.is_within_line(writer.size):
                writer.append(writer.size, b"\n")
            self.position.sizes[name] = writer.size

    def keep(self, new: PodLines) -> Mapping[Stream, tuple[int, bytes]]:
        """Store lines. Returns the streams that have grown, with their size and the new bytes.
        Raises StorageError."""
        pieces: dict[str, list[bytes]] = {}
        for text in new.lines:
            match found := labelled(text.rstrip(b"\n")):
                case ProcessLine(process, stderr, line):
                    name = f"{process}.{'err' if stderr else 'out'}"
                    if name in self._writers:
                        pieces.setdefault(name, []).append(line)
                        continue
                case ScriptLine.BEGIN:
                    continue
                case ScriptLine.END:
                    self.position.whole = True
                    continue
                case ScriptLine.TERM:
                    self.position.deleted = True
                    continue
                case ProcessEnd():
                    if f"{found.process}.out" in self._writers:
                        known = {one.process for one in self.position.ends}
                        if found.process not in known:
                            end = replace(found, after_term=self.position.deleted)
                            self.position.ends += (end,)
                        continue
            self.words.append(text.decode(errors="replace").rstrip("\n"))
            name = f"{self._first}.err"
            parts = pieces.setdefault(name, [])
            if self._within_line(name, parts):
                parts.append(b"\n")
            parts.append(text.rstrip(b"\n") + b"\n")
        grown = {}
        position = self.position
        sizes = dict(position.sizes)
        for name, parts in pieces.items():
            writer = self._writers[name]
            data = b"".join(parts)
            grown[writer.stream] = writer.append(sizes[name], data), data
            sizes[name] += len(data)
        # All at once: if a stream cannot be stored, all these lines are read again.
        position.sizes = sizes
        position.last, position.count, position.latest = new.last, new.count, new.latest
        return grown

    def _within_line(self, name: str, parts: Sequence[bytes]) -> bool:
        """Whether a stream with ``parts`` after its position ends within a line."""
        if parts:
            return not parts[-1].endswith(b"\n")
        return self._writers[name].is_within_line(self.position.sizes[name])
