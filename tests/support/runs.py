"""Small runs for tests of the views."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from dtrain.launchplan.plan import HostPlan, LaunchPlan, Process
from dtrain.messages.decode import ProtocolError, parse_object
from dtrain.messages.telemetry import Sample
from dtrain.runs.folder import RunFolder
from dtrain.runs.log_store import LogWriter, Stream
from dtrain.spec.model import Host, Job
from support.limits import HANG


def plan(hosts: int = 2, workers: int = 2) -> LaunchPlan:
    """``node0`` and on, with ranks in order."""
    return LaunchPlan(
        "demo",
        tuple(
            HostPlan(
                Host(f"node{node}", "127.0.0.1", slots=workers),
                node,
                {},
                tuple(
                    Process("worker", rank, ("python",), {}, rank=rank)
                    for rank in range(node * workers, (node + 1) * workers)
                ),
                "~",
            )
            for node in range(hosts)
        ),
        Job("torch", script="train.py"),
        "~/.dtrain",
    )


def averages(folder: Path, host: str) -> list[Sample]:
    """All averages that the run in ``folder`` has of a host."""
    file, found = folder / "telemetry" / f"{host}.jsonl", []
    for line in file.read_bytes().splitlines() if file.exists() else ():
        with contextlib.suppress(ProtocolError):  # a line that was cut short
            found.append(Sample.read(parse_object(line)))
    return found


class Workers:
    """Writes output into a run's folder like a session."""

    def __init__(self, folder: Path) -> None:
        self.folder = RunFolder(folder)
        self.folder.logs.mkdir(exist_ok=True)

    def stream(self, host: str, rank: int, fd: str = "stdout") -> Stream:
        name = f"worker-{rank}.{'out' if fd == 'stdout' else 'err'}"
        return self.folder.stream(host, name, ranked=True)

    def write(self, stream: Stream, data: bytes, clock: Callable[[], float] = time.time) -> int:
        """Append to the stream; its size."""
        writer = LogWriter(stream, clock)
        return writer.append(writer.size, data)


class Capture:
    """A pipe that a thread reads to its end. ``stream`` is its writing end, as text.

    One that is ``stopped`` is not read before `resume`.
    """

    def __init__(self, *, stopped: bool = False) -> None:
        self._read, write = os.pipe()
        self.stream = os.fdopen(write, "w", encoding="utf-8")
        self._pieces: list[bytes] = []
        self._thread = threading.Thread(target=self._drain, daemon=True)
        if not stopped:
            self.resume()

    def resume(self) -> None:
        self._thread.start()

    def _drain(self) -> None:
        while piece := os.read(self._read, 1 << 20):
            self._pieces.append(piece)
        os.close(self._read)

    def so_far(self) -> str:
        return b"".join(self._pieces).decode(errors="replace")

    def data(self) -> bytes:
        """Everything that was written; closes the writing end."""
        self.stream.close()
        self._thread.join(HANG)
        return b"".join(self._pieces)

    def text(self) -> str:
        return self.data().decode()
