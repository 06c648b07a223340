"""The log of a container: which lines are new, and which process wrote them. Pure."""

from __future__ import annotations

import re
from datetime import datetime, timezone
from enum import Enum
from typing import Annotated

from dtrain.engines.kubernetes.script import BEGINS, ENDS, MARK, TERM
from dtrain.messages.decode import Length, Range
from dtrain.records import dataclass

STEP_SECONDS = 60
"""Seconds by which the clock of a machine may step back while no stream reads its log."""
_STAMPED = re.compile(
    rb"([0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2})(?:\.([0-9]{1,9}))?"
    rb"(Z|[+-][0-9]{2}:[0-9]{2}) ?"
)
_LABELLED = re.compile(rb"\[([a-z]{1,20}-[0-9]{1,7})( err)?(\+)?\] ?")
_ENDED = re.compile(
    re.escape(MARK).encode() + rb" ([a-z]{1,20}-[0-9]{1,7}) ended: ([0-9]{1,3}) at"
    rb" ([0-9]{1,12}(?:\.[0-9]{1,9})?)(?![0-9.])"
)
"""The locale of a container may have another decimal point, which then ends the time."""


@dataclass(frozen=True, slots=True)
class ProcessLine:
    process: str
    stderr: bool
    text: bytes
    """With its newline; without one if the next line of the stream goes on with this one."""


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """The script's line about the end of a process."""

    process: Annotated[str, Length(100)]
    status: Annotated[int, Range(0, 999)]
    time: float
    """Seconds since the epoch, on the clock of the pod's machine."""
    after_term: bool = False
    """Whether the script had written before that its pod is deleted."""

    @property
    def failed(self) -> bool:
        """Whether it failed on its own."""
        return self.status != 0 and not self.after_term


class ScriptLine(bytes, Enum):
    """A line that the script writes of itself."""

    BEGIN = BEGINS.encode()
    """The first line."""
    END = ENDS.encode()
    """The last line."""
    TERM = TERM.encode()
    """Its pod is deleted."""


_SCRIPT_LINES = frozenset(ScriptLine)


def labelled(text: bytes) -> ProcessLine | ProcessEnd | ScriptLine | None:
    """What a line of the script means; None if another program wrote the line."""
    if text in _SCRIPT_LINES:
        return ScriptLine(text)
    if found := _LABELLED.match(text):
        end = b"" if found[3] else b"\n"
        return ProcessLine(found[1].decode(), found[2] is not None, text[found.end() :] + end)
    if found := _ENDED.match(text):
        return ProcessEnd(found[1].decode(), int(found[2]), float(found[3]))
    return None


def stamped(line: bytes) -> tuple[int, bytes] | None:
    """The time of a line, in nanoseconds since the epoch, and its text; None without a time."""
    found = _STAMPED.match(line)
    if found is None:
        return None
    zone = "+00:00" if found[3] == b"Z" else found[3].decode()
    try:
        moment = datetime.fromisoformat(found[1].decode() + zone)
    except ValueError:
        return None
    fraction = int((found[2] or b"").decode().ljust(9, "0"))
    return int(moment.timestamp()) * 10**9 + fraction, line[found.end() :]


class Cursor:
    """Finds the new lines of a log that is read again from some time before its last known line.

    The order of the lines counts, not their time: the clock of a machine may step back.
    """

    def __init__(self, last: int = -1, count: int = 0, latest: int = -1) -> None:
        """``last``: time of the last line, in nanoseconds since the epoch; ``count``: lines that
        were read with this time; ``latest``: the latest time of all lines."""
        self.last = last
        self.count = count
        self.latest = max(last, latest)
        self._skip = 0
        """Times that the last known line comes again before the first new one."""

    @property
    def since(self) -> str | None:
        """The value of ``sinceTime``, which counts in seconds; None to read from the start."""
        if self.last < 0:
            return None
        seconds = max(0, self.last // 10**9 - STEP_SECONDS)
        return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")

    def begin(self) -> None:
        """A new stream begins, at `since`."""
        self._skip = self.count

    def is_new(self, time: int) -> bool:
        """Whether the line with this time was not read before; counts it then."""
        if self._skip and time <= self.latest:
            self._skip -= time == self.last
            return False
        self._skip = 0
        self.count = self.count + 1 if time == self.last else 1
        self.last = time
        self.latest = max(self.latest, time)
        return True

    def takes_gap(self, time: int) -> bool:
        """Whether lines before the line with this time are missing: the last known one is not there
        any more, because the kubelet has rotated the log. True once for each stream."""
        gap = self._skip > 0 and time > self.latest
        if gap:
            self._skip = 0
        return gap
