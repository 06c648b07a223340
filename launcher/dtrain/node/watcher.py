"""What a program beside a job sees of its workers on one machine: telemetry, and their stacks.

It finds the workers by the files ``<role>-<index>.pid`` in the folder of the attempt. Its messages:

    sample, average  said: as `dtrain.node.telemetry` documents them
    event            event: stack, collectives, ras or stacks_done of an agent
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
import time

from dtrain.node.agent.diagnosis import Diagnosis
from dtrain.node.agent.flight_recorder import FlightRecorders
from dtrain.node.agent.nccl_ras import address_in
from dtrain.node.agent.processes import Proc, environment_of, look, processes
from dtrain.node.agent.worker_files import read_regular
from dtrain.node.files import listed
from dtrain.node.telemetry.sampler import Sampler

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, Callable

    from dtrain.node.agent.wire import Json

PROCESS_FILE = re.compile(rb"([a-z]{1,20})-([0-9]{1,6})\.pid")
RANK = re.compile(rb"[0-9]{1,6}")


class Watcher:
    def __init__(self, folder: bytes, world_size: int, report: Callable[..., None]) -> None:
        """``folder``: of the attempt. ``report`` gets the type of a message, and its fields."""
        self._folder = folder
        self._world_size = world_size
        self._report = report
        self._sampler = Sampler(lambda: self, self.running, self.owns, folder)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Send telemetry until the end, or until TERM: then the last average is sent."""
        self._sampler.start()
        signal.signal(signal.SIGTERM, end_wait)
        with contextlib.suppress(SystemExit):
            yield
            ignore_term()
        self._sampler.stop()

    def show(self, sample: Json) -> None:
        self._report("sample", said=sample)

    def store(self, sample: Json) -> None:
        self._report("average", said=sample)

    def append(self, kind: str, **body: Any) -> None:
        self._report("event", event={"event": kind, "time": time.time(), **body})

    def owns(self, pid: int) -> bool:
        """Whether the environment of a process marks it as one of the job."""
        environment = environment_of(pid, having=b"DTRAIN_RUN_DIR=")
        return environment.get(b"DTRAIN_RUN_DIR") == self._folder

    def running(self) -> list[tuple[Json, Proc]]:
        """The identity and process of every worker, and of every rank of a torchrun."""
        found: list[tuple[Json, Proc]] = []
        for role, index, proc in self.started():
            ranks = self._ranks_below(proc.pid) if role == "torchrun" else []
            found += ranks or [(identity(role, index, environment_of(proc.pid)), proc)]
        return found

    def started(self) -> list[tuple[str, int, Proc]]:
        """The processes that the job's script has started and that still run."""
        found: list[tuple[str, int, Proc]] = []
        for name in listed(self._folder):
            file = PROCESS_FILE.fullmatch(name)
            pid = read_regular(os.path.join(self._folder, name), 16) if file else None
            if not file or not pid or not pid.strip().isdigit():
                continue
            proc = look(int(pid))
            # The number may be that of another process by now.
            if proc is not None and self.owns(proc.pid):
                found.append((file[1].decode(), int(file[2]), proc))
        return found

    def _ranks_below(self, torchrun: int) -> list[tuple[Json, Proc]]:
        found = []
        for proc in processes().values():
            if proc.ppid == torchrun:
                environment = environment_of(proc.pid, having=b"LOCAL_RANK=")
                rank = rank_in(environment)
                if rank is not None:
                    found.append((identity("worker", rank, environment), proc))
        return found

    def diagnose(self, *, abort: bool, ras: bool) -> None:
        """Report the stacks of the workers, as in the order ``stacks`` of an agent. Returns at
        once: it may take long to find the processes."""
        threading.Thread(target=self._diagnose, args=(abort, ras), daemon=True).start()

    def _diagnose(self, abort: bool, ras: bool) -> None:
        running = self.running()
        environment = environment_of(running[0][1].pid) if running else {}
        folder = self._folder
        with contextlib.suppress(OSError):
            folder = os.readlink(b"/proc/%d/cwd" % running[0][1].pid) if running else folder
        flights = FlightRecorders(environment, folder, self._world_size)
        address = address_in(environment) if running else None
        Diagnosis(self, flights, address).collect_stacks(running, abort, ras)


def end_wait(*_: object) -> None:
    """End the wait for an order, on TERM."""
    ignore_term()
    sys.exit()


def ignore_term() -> None:
    """TERM may come again, which must not keep the last average back."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def identity(role: str, index: int, environment: dict[bytes, bytes]) -> Json:
    return {"role": role, "index": index, "rank": rank_in(environment)}


def rank_in(environment: dict[bytes, bytes]) -> int | None:
    rank = environment.get(b"RANK", b"")
    return int(rank) if RANK.fullmatch(rank) else None
