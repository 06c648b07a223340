"""The telemetry of a run, kept in its folder.

    <run>/telemetry/<host>.jsonl    averages of 10 s, a line each
    <run>/telemetry/<host>.now      the latest sample: one line, replaced every second

`dtrain top` and reports read it while another process writes. The averages of a run take at most
`DAILY` bytes for each day and 1,024 GPUs: a file that has reached its limit loses lines of its
older part, evenly over time. The newest lines stay, an hour of them in a run of 128 hosts.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from dtrain.messages.decode import ProtocolError, parse_object
from dtrain.messages.telemetry import Sample
from dtrain.runs.stored_file import check_host_name, open_stored, replaced, stored_reader

PERIOD = 10.0
"""Seconds of an average."""
MAX_LINE = 1 << 17
DAILY, GPUS = 45_000_000, 1024
RECENT, OLDER = 1 / 4, 3 / 8
"""Parts of a file's limit: its newest lines, and what remains of older ones after thinning."""
_TIME = re.compile(rb'\{"time": ?([0-9]{1,12}(?:\.[0-9]{1,9})?),')
"""The start of a line."""


def latest(folder: Path, host: str) -> Sample | None:
    """The last sample of a host of the run in ``folder``; None if there is none."""
    try:
        with stored_reader(_file(folder, host, ".now")) as file:
            return _sample(file.readline(MAX_LINE))
    except (OSError, ValueError):
        return None


def sampled(folder: Path, host: str, most: int) -> Iterator[Sample]:
    """At most ``most`` averages of a host, evenly over time, oldest first, without what its ranks
    use. Decodes no more than these, so that a report of a long run is quick."""
    try:
        with stored_reader(_file(folder, host)) as file:
            total = max((elapsed for elapsed, _ in _averages(file)), default=0.0)
            file.seek(0)
            last = -1
            for elapsed, line in _averages(file):
                place = int(min(elapsed / total, 1.0) * (most - 1)) if total else 0
                if place > last and (sample := _sample(line, ranks=False)) is not None:
                    last = place
                    yield sample
    except (OSError, ValueError):
        return


def _averages(file: BinaryIO) -> Iterator[tuple[float, bytes]]:
    """The lines of a file, each with the seconds since the first one, even if the host's clock was
    set back."""
    elapsed, before = -PERIOD, math.inf
    while line := file.readline(MAX_LINE):
        at = _time(line)
        if at is not None:
            elapsed += at - before if at > before else PERIOD
            before = at
            yield elapsed, line


def last_time(folder: Path, host: str) -> int:
    """The time of a host's last average in seconds since the epoch, rounded up; 0 without any."""
    found: Sample | None = None
    with contextlib.suppress(OSError, ValueError), stored_reader(_file(folder, host)) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 2 * MAX_LINE))
        found = next(filter(None, map(_sample, reversed(file.readlines()))), None)
    return round_up(found) if found is not None else 0


def round_up(sample: Sample) -> int:
    """A whole number of seconds after which the next average begins."""
    return int(sample.time) + 1


class TelemetryWriter:
    """Stores the telemetry of one host. A full disk only loses it."""

    def __init__(self, folder: Path, host: str, hosts: int = 1) -> None:
        """``hosts`` share the storage of the run. Raises ValueError if ``host`` is not the name of
        a file."""
        self._averages, self._now = _file(folder, host), _file(folder, host, ".now")
        self._hosts = hosts
        self._limit = 0
        """Bytes; more time raises it."""
        self._whole = False
        """Whether the file ends with a whole line."""

    def append(self, average: Sample) -> bool:
        """Whether the average is stored."""
        # A launcher that was killed, or a full disk, may have left half a line.
        before = b"" if self._whole else b"\n"
        self._whole = self._write(self._averages, average, os.O_APPEND, before)
        if self._whole:
            with contextlib.suppress(OSError):
                self._keep_limit(average)
        return self._whole

    def _keep_limit(self, newest: Sample) -> None:
        if self._limit and self._averages.stat().st_size <= self._limit:
            return
        daily = DAILY * max(1 / self._hosts, len(newest.gpus) / GPUS)
        with stored_reader(self._averages) as file:
            elapsed = max((elapsed for elapsed, _ in _averages(file)), default=0.0)
            self._limit = int(daily * max(1.0, elapsed / 86400))
            if os.fstat(file.fileno()).st_size <= self._limit:
                return
            file.seek(0)
            averages = [*_averages(file)]
        with replaced(self._averages) as file:
            file.writelines(thinned(averages, self._limit))

    def show(self, sample: Sample) -> None:
        self._write(self._now, sample, 0)

    def _write(self, path: Path, sample: Sample, flags: int, before: bytes = b"") -> bool:
        line = before + json.dumps(sample.as_json(), separators=(",", ":")).encode() + b"\n"
        if len(line) > MAX_LINE:
            return False
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            fd = open_stored(path, os.O_WRONLY | os.O_CREAT | flags)
            with os.fdopen(fd, "wb", buffering=0) as file:
                whole = file.write(line) == len(line)
                if whole and not flags:
                    file.truncate(len(line))
        except OSError:
            return False
        return whole


def thinned(averages: Sequence[tuple[float, bytes]], limit: int) -> list[bytes]:
    """Lines of at most `RECENT` + `OLDER` of ``limit`` bytes: the newest ones, and older ones
    evenly over time. Each average is a number of seconds and its line."""
    begin, size = len(averages), 0.0
    while begin and size + len(averages[begin - 1][1]) <= RECENT * limit:
        begin -= 1
        size += len(averages[begin][1])
    older, newest = averages[:begin], [line for _, line in averages[begin:]]
    if not older:
        return newest
    count = OLDER * limit / max(len(line) for _, line in older)
    slots: dict[int, bytes] = {}
    start, spacing = older[0][0], (older[-1][0] - older[0][0]) / max(1.0, count - 1)
    for at, line in older:
        slots.setdefault(int((at - start) / spacing) if spacing else 0, line)
    return [*slots.values(), *newest]


def _file(folder: Path, host: str, suffix: str = ".jsonl") -> Path:
    check_host_name(host)
    return folder / "telemetry" / f"{host}{suffix}"


def _time(line: bytes) -> float | None:
    """The time of an average; None for anything else."""
    found = _TIME.match(line)
    return float(found[1]) if found else None


def _sample(line: bytes, *, ranks: bool = True) -> Sample | None:
    try:
        body = parse_object(line)
        return Sample.read(body if ranks else {**body, "ranks": []})
    except ProtocolError:
        return None
