"""Samples this host once a second, in a thread of its own."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time

from dtrain.node.agent.kernel_log import KernelLog
from dtrain.node.agent.wire import encode
from dtrain.node.telemetry.gpus import FIELDS, gpu_tool
from dtrain.node.telemetry.host import HostCounters
from dtrain.node.telemetry.ranks import RankCounters
from dtrain.node.telemetry.round_trips import RoundTrips
from dtrain.node.telemetry.tool import combined

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Protocol

    from dtrain.node.agent.processes import Proc
    from dtrain.node.agent.wire import Json

    class Sink(Protocol):
        """What gets the samples of a host."""

        def show(self, sample: Json) -> None:
            """The sample of this second."""

        def store(self, sample: Json) -> None:
            """An average of 10 s."""


NOW, STORED = b"telemetry-now", b"telemetry"
"""The files in the run's folder."""
PERIOD, WINDOW = 1.0, 10.0
"""Seconds between two samples, and of one average."""
MAX_STORED = 24 << 20
"""Bytes of averages that a host keeps: at least a day with 8 GPUs."""
MAX_NOW = 1 << 16
STOP_LIMIT = 2.0
"""Seconds that the end of the run waits for the last average."""
XID = r"NVRM: Xid \(PCI:([0-9a-fA-F:.]{1,20})\)"


class Sampler:
    """Takes the samples of one run. Its failures do not affect the run."""

    def __init__(
        self,
        open_sink: Callable[[], Sink],
        running: Callable[[], list[tuple[Json, Proc]]],
        own: Callable[[int], bool | None],
        folder: bytes | int,
    ) -> None:
        """``open_sink`` returns what gets the samples. ``running`` returns the identity and
        process of each rank; ``own``, whether a process is marked as one of the run. All are
        called in the sampler's thread. ``folder`` is on the disk whose space is sampled."""
        self._open_sink = open_sink
        self._own, self._folder = own, folder
        self._running = running
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        with contextlib.suppress(RuntimeError):  # too many threads
            self._thread.start()

    def stop(self) -> None:
        """Write the last average, and end the GPU tool."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(STOP_LIMIT)

    def _run(self) -> None:
        gpus = gpu_tool(self._own)
        try:
            with contextlib.suppress(Exception):  # such as a full disk: the run continues
                self._sample(gpus)
        finally:
            if gpus is not None:
                gpus.stop()

    def _sample(self, gpus: Any) -> None:
        host, ranks, xids = HostCounters(), RankCounters(self._running), Xids()
        trips = RoundTrips()
        host.read()
        ranks.read()
        sink = self._open_sink()
        window: list[Json] = []
        due = time.monotonic()
        stopping = False
        while not stopping:
            # After the host was suspended, take no samples for the missed time.
            due = max(due + PERIOD, time.monotonic())
            stopping = self._stopping.wait(due - time.monotonic())
            sample = {
                "time": round(time.time(), 3),
                **host.read(),
                "storage": storage(self._folder),
                "gpus": gpus.read(xids.count()) if gpus is not None else [],
                "ranks": ranks.read(),
                "round_trip": trips.read(ranks.sockets),
            }
            if window and sample["time"] // WINDOW != window[0]["time"] // WINDOW:
                sink.store(average(window))
                window = []
            window.append(sample)
            sink.show(sample)
        sink.store(average(window))


def storage(folder: bytes | int) -> list[int] | None:
    """Used and total bytes of the disk with a folder."""
    try:
        disk = os.statvfs(folder)
    except OSError:
        return None
    used = max(0, disk.f_blocks - disk.f_bavail)  # more can be free than a quota allows
    return [used * disk.f_frsize, disk.f_blocks * disk.f_frsize]


class Files:
    """The two files of the run's folder. A worker can remove them, which only ends the samples. A
    full disk loses those that it has no room for."""

    def __init__(self, folder: int) -> None:
        self._folder = folder
        flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        self._now = os.open(NOW, flags, 0o600, dir_fd=folder)
        self._flags = flags
        self._stored = os.open(STORED, flags, 0o600, dir_fd=folder)
        self._size = 0

    def show(self, sample: Json) -> None:
        line = encode(sample) + b"\n"
        if len(line) <= MAX_NOW:
            with contextlib.suppress(OSError):
                os.ftruncate(self._now, os.pwrite(self._now, line, 0))

    def store(self, sample: Json) -> None:
        line = encode(sample) + b"\n"
        if len(line) > MAX_NOW:
            return
        with contextlib.suppress(OSError):
            if self._size + len(line) > MAX_STORED:
                self._drop_half()
            if os.pwrite(self._stored, line, self._size) == len(line):
                self._size += len(line)
            else:
                os.ftruncate(self._stored, self._size)

    def _drop_half(self) -> None:
        """Replace the file by its second half. A relay sees that the file is shorter now."""
        data = os.pread(self._stored, self._size, self._size // 2).partition(b"\n")[2]
        draft = b".telemetry"
        fd = os.open(draft, self._flags | os.O_TRUNC, 0o600, dir_fd=self._folder)
        try:
            size = os.pwrite(fd, data, 0)
            os.rename(draft, STORED, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except OSError:
            os.close(fd)
            raise
        os.close(self._stored)
        self._stored, self._size = fd, data.rfind(b"\n", 0, size) + 1
        os.ftruncate(fd, self._size)


class Xids:
    """Counts Xid errors by PCI address, if this user may read the kernel's log."""

    def __init__(self) -> None:
        self._log = KernelLog()
        self._counts: dict[str, int] = {}
        self._until = 0.0

    def count(self) -> dict[str, int]:
        now = time.monotonic()
        if self._log.readable and now >= self._until:
            self._until = now + WINDOW
            for _, line in self._log.read():
                found = re.search(XID, line)
                if found:
                    bus = found[1].lower().partition(".")[0]
                    self._counts[bus] = self._counts.get(bus, 0) + 1
        return self._counts


# Averages

MAXIMA = ("memory_used", "temperature", "ecc", "xids", "ecc_corrected", "others", "others_memory")


def average(window: list[Json]) -> Json:
    """The averages of samples: of each number the mean, of memory and temperature the maximum, and
    all reasons for a slow clock."""
    last = window[-1]
    if len(window) == 1:
        return last
    found: Json = {"time": window[0]["time"], "cpus": last["cpus"]}
    found["cpu"] = mean([one["cpu"] for one in window], 2)
    found["memory"] = highest([one["memory"] for one in window])
    found["storage"] = last["storage"]
    found["losses"] = mean([one["losses"] for one in window], 2)
    found["round_trip"] = mean([one["round_trip"] for one in window], 3)
    for name in ("disk", "network", "infiniband"):
        pairs = [one[name] for one in window if one[name] is not None]
        found[name] = [mean(column, 0) for column in zip(*pairs)] if pairs else None
    found["gpus"] = [gpu_average(rows) for rows in grouped(window, "gpus")]
    found["ranks"] = [rank_average(rows) for rows in grouped(window, "ranks")]
    return found


def rank_average(rows: list[list[Any]]) -> list[Any]:
    names, cpu, memory, files = zip(*rows)
    return [names[-1], mean(cpu, 2), highest(list(memory)), highest(list(files))]


def gpu_average(rows: list[list[Any]]) -> list[Any]:
    found: list[Any] = []
    for name, column in zip(FIELDS, zip(*rows)):
        if name == "slowed":
            bits = [value for value in column if value is not None]
            found.append(combined(bits) if bits else None)
        elif name in MAXIMA or name in ("index", "memory_total"):
            found.append(highest(list(column)))
        else:
            found.append(mean(list(column), 1))
    return found


def grouped(window: list[Json], name: str) -> list[list[Any]]:
    """The rows of each GPU or process of the last sample."""
    rows: dict[Any, list[Any]] = {row[0]: [] for row in window[-1][name]}
    for one in window:
        for row in one[name]:
            if row[0] in rows:
                rows[row[0]].append(row)
    return list(rows.values())


def mean(values: Any, digits: int) -> float | None:
    known = [value for value in values if value is not None]
    return round(sum(known) / len(known), digits) if known else None


def highest(values: list[Any]) -> Any:
    return max((value for value in values if value is not None), default=None)
