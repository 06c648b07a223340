"""Samples this host once a second, in a thread of its own."""

from __future__ import annotations

import contextlib
import threading
import time

from dtrain.node.files import find_program
from dtrain.node.telemetry.amd import ARGUMENTS, Amd
from dtrain.node.telemetry.averages import average
from dtrain.node.telemetry.host import HostCounters, storage
from dtrain.node.telemetry.nvidia import Nvidia
from dtrain.node.telemetry.ranks import RankCounters
from dtrain.node.telemetry.round_trips import RoundTrips
from dtrain.node.telemetry.xids import Xids

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Protocol

    from dtrain.node.agent.processes import Proc
    from dtrain.node.agent.wire import Json
    from dtrain.node.telemetry.nvidia import Own

    class Sink(Protocol):
        """What gets the samples of a host."""

        def show(self, sample: Json) -> None:
            """The sample of this second."""

        def store(self, sample: Json) -> None:
            """An average of 10 s."""


PERIOD, WINDOW = 1.0, 10.0
"""Seconds between two samples, and of one average."""
STOP_LIMIT = 2.0
"""Seconds that the end of the run waits for the last average."""


class Sampler:
    """Takes the samples of one run. Its failures do not affect the run."""

    def __init__(
        self,
        open_sink: Callable[[], Sink],
        running: Callable[[], list[tuple[Json, Proc]]],
        own: Own,
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


def gpu_tool(own: Own) -> Nvidia | Amd | None:
    """The tool of this host's GPUs, if it has one. ``own``: whether a process is marked as one of
    the run."""
    nvidia = find_program("nvidia-smi")
    if nvidia:
        return Nvidia(nvidia, own)
    amd = [[path, *arguments] for name, arguments in ARGUMENTS if (path := find_program(name))]
    return Amd(amd) if amd else None
