"""The telemetry of a run, kept in its folder.

    <run>/telemetry/<host>.jsonl    averages of 10 s, a line each
    <run>/telemetry/<host>.now      the latest sample: one line, replaced every second

`dtrain top` and reports read it while another process writes.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from dtrain.messages.decode import ProtocolError, parse
from dtrain.messages.telemetry import Sample
from dtrain.runs.stored_file import open_stored

MAX_LINE = 1 << 17


def latest(folder: Path, host: str) -> Sample | None:
    """The last sample of a host of the run in ``folder``; None if there is none."""
    try:
        with os.fdopen(open_stored(_file(folder, host, ".now"), os.O_RDONLY), "rb") as file:
            return _sample(file.readline(MAX_LINE))
    except (OSError, ValueError):
        return None


def averages(folder: Path, host: str) -> Iterator[Sample]:
    """The averages of a host, oldest first. Leaves out what cannot be read."""
    try:
        with os.fdopen(open_stored(_file(folder, host), os.O_RDONLY), "rb") as file:
            while line := file.readline(MAX_LINE):
                if line != b"\n" and (sample := _sample(line)) is not None:
                    yield sample
    except (OSError, ValueError):
        return


def sampled(folder: Path, host: str, most: int) -> Iterator[Sample]:
    """At most ``most`` averages of a host, evenly over its file, oldest first. Reads no more than
    these, so that a report of a long run is quick."""
    try:
        with os.fdopen(open_stored(_file(folder, host), os.O_RDONLY), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            for number in range(most):
                at = size * number // most
                if at < file.tell() and number:
                    at = file.tell()
                elif at:
                    file.seek(at - 1)
                    file.readline(MAX_LINE)  # the rest of a line that began before
                line = file.readline(MAX_LINE)
                if not line:
                    return
                if line != b"\n" and (sample := _sample(line)) is not None:
                    yield sample
    except (OSError, ValueError):
        return


def last_time(folder: Path, host: str) -> int:
    """The time of a host's last average in seconds since the epoch, rounded up; 0 without any."""
    found: Sample | None = None
    with (
        contextlib.suppress(OSError, ValueError),
        os.fdopen(open_stored(_file(folder, host), os.O_RDONLY), "rb") as file,
    ):
        file.seek(max(0, os.fstat(file.fileno()).st_size - 2 * MAX_LINE))
        for line in file:
            found = _sample(line) or found
    return round_up(found) if found is not None else 0


def round_up(sample: Sample) -> int:
    """A whole number of seconds after which the next average begins."""
    return int(sample.time) + 1


class TelemetryWriter:
    """Stores the telemetry of one host. A full disk only loses it."""

    def __init__(self, folder: Path, host: str) -> None:
        """Raises ValueError if ``host`` is not the name of a file."""
        self._averages, self._now = _file(folder, host), _file(folder, host, ".now")
        self._begun = False

    def append(self, average: Sample) -> bool:
        """Whether the average is stored."""
        # A launcher that was killed may have left half a line.
        stored = self._write(self._averages, average, os.O_APPEND, b"" if self._begun else b"\n")
        self._begun |= stored
        return stored

    def show(self, sample: Sample) -> None:
        self._write(self._now, sample, 0)

    def _write(self, path: Path, sample: Sample, flags: int, before: bytes = b"") -> bool:
        line = before + json.dumps(sample.as_json(), separators=(",", ":")).encode() + b"\n"
        if len(line) > MAX_LINE:
            return False
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            fd = open_stored(path, os.O_WRONLY | os.O_CREAT | flags)
            try:
                if os.write(fd, line) == len(line) and not flags:
                    os.ftruncate(fd, len(line))
            finally:
                os.close(fd)
        except OSError:
            return False
        return True


def _file(folder: Path, host: str, suffix: str = ".jsonl") -> Path:
    if not host or host in (".", "..") or "/" in host or "\0" in host:
        raise ValueError(f"not a host name: {host!r}")
    return folder / "telemetry" / f"{host}{suffix}"


def _sample(line: bytes) -> Sample | None:
    try:
        return Sample.read(parse(line))
    except ProtocolError:
        return None
