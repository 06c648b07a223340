"""The watcher: telemetry and stacks of the processes of a Slurm job on one machine.

It runs in a step of its own beside the job, one on each machine. srun gives each the same orders,
lines of JSON:

    folder, world_size        the first: the folder of the attempt, which has one for each machine
    host, abort, ras          the machine ``host`` reports the stacks of its workers, as in the
                              order ``stacks`` of an agent

It writes messages, each with its ``host``:

    sample, average  said: as `dtrain.node.telemetry` documents them
    event            event: stack, collectives, ras or stacks_done of an agent

It ends with its input, or with TERM at the end of the job; the last average is sent before.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import threading
import time

from dtrain.node.agent.diagnosis import Diagnosis
from dtrain.node.agent.flight_recorder import FlightRecorders
from dtrain.node.agent.folder import expand
from dtrain.node.agent.nccl_ras import address_in
from dtrain.node.agent.processes import Proc, environment_of, look, processes
from dtrain.node.agent.wire import raw
from dtrain.node.agent.worker_files import read_regular
from dtrain.node.files import listed
from dtrain.node.slurm.wire import StepOutput
from dtrain.node.telemetry.sampler import Sampler

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, BinaryIO

    from dtrain.node.agent.wire import Json
    from dtrain.node.importer import Importer

PROCESS_FILE = re.compile(rb"([a-z]{1,20})-([0-9]{1,6})\.pid")
RANK = re.compile(rb"[0-9]{1,6}")


class Watcher:
    def __init__(self, order: Json) -> None:
        self._host = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
        self._folder = os.path.join(expand(order["folder"]), raw(self._host))
        self._world_size = order["world_size"]
        self._output = StepOutput()

    def serve(self, stream: BinaryIO) -> None:
        sampler = Sampler(lambda: self, self.running, self.owns, self._folder)
        sampler.start()
        signal.signal(signal.SIGTERM, end_wait)
        with contextlib.suppress(SystemExit):
            for line in iter(stream.readline, b""):
                order = json.loads(line)
                if order["host"] == self._host:
                    # It may take long to find the processes.
                    threading.Thread(target=self._diagnose, args=(order,), daemon=True).start()
            ignore_term()
        sampler.stop()

    def show(self, sample: Json) -> None:
        self._send("sample", said=sample)

    def store(self, sample: Json) -> None:
        self._send("average", said=sample)

    def append(self, kind: str, **body: Any) -> None:
        self._send("event", event={"event": kind, "time": time.time(), **body})

    def owns(self, pid: int) -> bool:
        """Whether the environment of a process marks it as one of the job."""
        environment = environment_of(pid, having=b"DTRAIN_RUN_DIR=")
        return environment.get(b"DTRAIN_RUN_DIR") == self._folder

    def running(self) -> list[tuple[Json, Proc]]:
        """The identity and process of every worker, and of every rank of a torchrun."""
        found: list[tuple[Json, Proc]] = []
        for name in listed(self._folder):
            file = PROCESS_FILE.fullmatch(name)
            pid = read_regular(os.path.join(self._folder, name), 16) if file else None
            if not file or not pid or not pid.strip().isdigit():
                continue
            environment = environment_of(int(pid), having=b"DTRAIN_RUN_DIR=")
            proc = look(int(pid))
            # The number may be that of another process by now.
            if proc is None or environment.get(b"DTRAIN_RUN_DIR") != self._folder:
                continue
            role, index = file[1].decode(), int(file[2])
            ranks = self._ranks_below(proc.pid) if role == "torchrun" else []
            found += ranks or [(identity(role, index, environment), proc)]
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

    def _diagnose(self, order: Json) -> None:
        running = self.running()
        environment = environment_of(running[0][1].pid) if running else {}
        folder = self._folder
        with contextlib.suppress(OSError):
            folder = os.readlink(b"/proc/%d/cwd" % running[0][1].pid) if running else folder
        flights = FlightRecorders(environment, folder, self._world_size)
        ras = address_in(environment) if running else None
        Diagnosis(self, flights, ras).collect_stacks(running, order["abort"], order["ras"])

    def _send(self, kind: str, **body: Any) -> None:
        self._output.send({"type": kind, "host": self._host, **body})


def end_wait(*_: object) -> None:
    """End the wait for an order, on TERM."""
    ignore_term()
    sys.exit()


def ignore_term() -> None:
    """Slurm may send TERM again, which must not keep the last average back."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def identity(role: str, index: int, environment: dict[bytes, bytes]) -> Json:
    return {"role": role, "index": index, "rank": rank_in(environment)}


def rank_in(environment: dict[bytes, bytes]) -> int | None:
    rank = environment.get(b"RANK", b"")
    return int(rank) if RANK.fullmatch(rank) else None


def main(stream: BinaryIO, importer: Importer) -> None:
    Watcher(json.loads(stream.readline())).serve(stream)
    os._exit(0)
