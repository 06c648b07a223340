"""The detached process that owns the workers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from functools import partial

from dtrain.node.agent.closing import Closing
from dtrain.node.agent.connections import Connections
from dtrain.node.agent.containers import remove
from dtrain.node.agent.control import CONTROL_FD, control_name, machine_id
from dtrain.node.agent.control_server import ControlServer
from dtrain.node.agent.diagnosis import Diagnosis
from dtrain.node.agent.evidence import error_report, full_disk
from dtrain.node.agent.folder import discard
from dtrain.node.agent.kernel_log import oom_kills
from dtrain.node.agent.ports import share_ports
from dtrain.node.agent.preparation import Preparation
from dtrain.node.agent.processes import (
    Proc,
    exit_of,
    look,
    name_list,
    own_start,
    reap,
    signal_name,
)
from dtrain.node.agent.spawn import cannot_start
from dtrain.node.agent.sweep import Sweep, Tag, adopt_orphans, load_prctl
from dtrain.node.agent.wire import RefusedError, raw, text
from dtrain.node.telemetry.files import Files
from dtrain.node.telemetry.sampler import Sampler

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import BinaryIO, Callable, Mapping, NoReturn

    from dtrain.node.agent.commands import Command, SupervisorRequest
    from dtrain.node.agent.wire import Json
    from dtrain.node.agent.worker import Worker
    from dtrain.node.importer import Importer

START_WITHIN = 60.0
"""Seconds, besides the lease, that a prepared job waits for `start`."""
LATE = 1.0
"""Seconds by which a wait may be too long. If it is longer, this process stood still (SIGSTOP, a
paused virtual machine)."""
CLOSE_POLL = 0.02
"""Seconds between two looks at commands while the last work of a run is done."""


class Supervisor:
    """Owns the workers of one run on this host, from `prepared` to `ended`."""

    def __init__(self, request: SupervisorRequest, relay: socket.socket) -> None:
        self._request = request
        self._folder = raw(request["folder"])
        self._tag = Tag(request["run"], request["host"], self._folder)
        self._workdir = raw(request["absolute_workdir"])
        self._workers: dict[int, Worker] = {}
        self._groups: set[int] = set()
        self._sweep: Sweep | None = None
        self._closing: Closing | None = None
        self._stopping = self._started = self._over = False
        self._next_step = self._next_scan = 0.0
        self._oom_kills = 0
        self._stop_signal = ""
        self._prctl = load_prctl()
        self._subreaper = adopt_orphans(self._prctl)
        self._connections = Connections(request["job_ports"])
        self._containers = request["containers"]
        self._lease = float(request["lease"])
        self._grace = float(request["grace"])
        self._last_command = time.monotonic()
        self._control = ControlServer(
            relay, self._obey, self._abandoned, lambda: reap(self._child_ended)
        )

    def run(self) -> None:
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._note_signal)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self._control.broadcast({"type": "up", "pid": os.getpid()})
        try:
            self._prepare()
        except RefusedError as refusal:
            self._give_up(refusal.message)
            return
        self._control.broadcast({"type": "prepared"})
        try:
            while not self._over:
                self._turn()
        except BaseException as failure:
            # No worker may outlive its supervisor, even if the supervisor has a bug.
            survivors = self._sweep_now(lambda *_: None)
            if self._started:
                reason = str(failure)
                if not isinstance(failure, RefusedError):
                    reason = "%s: %s" % (type(failure).__name__, failure)
                self._events.append("ended", survivors=name_list(survivors), error=reason)
            raise

    def _turn(self) -> None:
        begun, pause = time.monotonic(), self._tick()
        self._control.wait(pause)
        now = time.monotonic()
        if pause is not None and (late := now - begun - pause) > LATE:
            self._last_command = min(now, self._last_command + late)  # it heard nothing then

    def _note_signal(self, signum: int, _frame: object) -> None:
        self._stop_signal = signal_name(signum)

    # Before the start

    def _prepare(self) -> None:
        """Check and reserve everything that the start will need. Raises RefusedError."""
        request = self._request
        name = control_name(request["run"], request["host"])
        self._control.listen(name)
        self._prepared = Preparation(request, self._folder, self._workdir, self._tag)
        self._prepared.save_record(
            {
                "pid": os.getpid(),
                "start": own_start(),
                "machine": machine_id(),
                "folder": request["folder"],
                "socket": text(name),
            }
        )

    def _wait_for_start(self, now: float) -> float:
        """Give up after a signal, or without a command for too long. Returns the seconds left."""
        waited = START_WITHIN + self._lease
        left = self._last_command + waited - now
        if self._stop_signal:
            self._give_up(RefusedError("agent", "stopped by " + self._stop_signal).message)
        elif left <= 0:
            reason = "no launcher for %g seconds, and the job had not started" % waited
            hint = "raise `job.lease` to pause a launcher for longer (Ctrl-Z)"
            self._give_up(RefusedError("agent", reason, hint).message)
        return 0.0 if self._over else left

    def _give_up(self, message: Json) -> None:
        """End a run that has not started and remove its traces. ``message`` says why."""
        self._sweep_now(self._child_ended)  # what setup left running
        discard(self._folder, [raw(path) for path in self._request["created"]])
        self._control.broadcast(message)
        self._over = True

    # The life of the run

    def _start(self) -> None:
        self._started = True
        prepared = self._prepared
        self._events = prepared.events
        share_ports(prepared.ports)
        self._diagnosis = Diagnosis(self._events, prepared.flights, prepared.ras_address)
        self._oom_kills = oom_kills(self._containers is not None)
        for worker in prepared.workers:
            try:
                worker.start(self._workdir, self._prctl, prepared.open_files)
            except OSError as error:
                raise cannot_start(error) from None
            self._workers[worker.pid] = worker
            self._groups.add(worker.pid)
            self._events.append("started", **worker.identity(), pid=worker.pid)
        self._diagnosis.collect_revision(self._workdir, self._request["code"])
        folder = os.dup(prepared.folder_fd)
        # The sampler's thread calls this once a second, so without a scan.
        running = partial(self._processes, scan=False)
        self._sampler = Sampler(lambda: Files(folder), running, self._tag.of, folder)
        self._sampler.start()

    def _tick(self) -> float | None:
        """Do what is due by the clock. Returns the seconds until something is due again."""
        now = time.monotonic()
        if not self._started:
            return self._wait_for_start(now)
        if self._stop_signal:
            signame, self._stop_signal = self._stop_signal, ""
            self._stop("the supervisor got " + signame, self._grace)
        if self._closing is not None:
            if self._closing.wait(CLOSE_POLL):
                self._end()
            return 0.0
        self._diagnosis.poll()
        if self._sweep is None and not self._workers:
            # All workers have exited: end what they left running.
            self._begin_sweep(self._grace)
        due: list[float] = []
        if self._sweep is not None:
            if now >= self._next_step:
                pause = self._sweep.step()
                if pause is None:
                    self._closing = Closing(
                        self._diagnosis.finish,
                        self._sampler.stop,
                        lambda: remove(self._containers),
                    )
                    return 0.0
                self._next_step = time.monotonic() + pause
            due.append(self._next_step)
        elif self._request["on_disconnect"] == "stop":
            left = self._last_command + self._lease - now
            if left <= 0:
                why = "no launcher for %g seconds, and job.on_disconnect is stop" % self._lease
                self._stop(why, self._grace)
                return 0.0
            due.append(self._last_command + self._lease)
        if self._workers:
            pause = self._connections.watch(self._worker_pids)
            if pause is not None:
                due.append(time.monotonic() + pause)
        torchruns = [worker for worker in self._workers.values() if worker.ranks is not None]
        if torchruns:
            if now >= self._next_scan:
                pause = min(self._find_ranks(worker, last=False) for worker in torchruns)
                self._next_scan = time.monotonic() + pause
            due.append(self._next_scan)
        return max(min(due) - time.monotonic(), 0.0) if due else None

    def _find_ranks(self, worker: Worker, *, last: bool) -> float:
        """Report ranks that torchrun has started. Returns the seconds until the next scan."""
        assert worker.ranks is not None
        found, pause = worker.ranks.scan(self._tag, last)
        for rank in found:
            self._events.append("rank", role=worker.role, index=worker.index, **rank)
        return pause

    def _processes(self, *, scan: bool) -> list[tuple[Json, Proc]]:
        """The identity and process of every worker, and of every rank of a torchrun. ``scan``: for
        the running ranks; otherwise those that were found."""
        found: list[tuple[Json, Proc | None]] = []
        for worker in list(self._workers.values()):
            ranks: Mapping[int, int | None] = {}
            if worker.ranks is not None:
                ranks = worker.ranks.living(self._tag) if scan else worker.ranks.started()
            for rank, pid in ranks.items():
                identity = {"role": "worker", "index": rank, "rank": rank}
                found.append((identity, look(pid) if pid is not None else None))
            if not ranks:  # a torchrun without ranks waits for other torchruns
                found.append((worker.identity(), worker.process(self._tag)))
        return [(identity, proc) for identity, proc in found if proc is not None]

    def _worker_pids(self) -> list[int]:
        found = (worker.process(self._tag) for worker in self._workers.values())
        return [proc.pid for proc in found if proc is not None]

    def _stop(self, reason: str, grace: float, *, asked: bool = False) -> None:
        if not self._stopping:
            self._stopping = True
            self._diagnosis.want_evidence()
            self._events.append("stopping", reason=reason, asked=asked)
        if self._sweep is None:
            self._begin_sweep(grace)
        else:
            self._sweep.kill_at = min(self._sweep.kill_at, time.monotonic() + grace)
            self._next_step = 0.0

    def _begin_sweep(self, grace: float) -> None:
        self._sweep = Sweep(
            self._tag,
            grace,
            self._child_ended,
            self._subreaper,
            self._groups,
            contained=self._containers is not None,
        )
        self._next_step = 0.0

    def _sweep_now(self, take: Callable[[int, int], None]) -> list[Proc]:
        survivors = Sweep(self._tag, 0.0, take, self._subreaper, self._groups).finish()
        if self._started:
            remove(self._containers)
        return survivors

    def _end(self) -> None:
        survivors = self._sweep.survivors if self._sweep is not None else []
        connected = self._connections.found
        self._events.append("ended", survivors=name_list(survivors), connected=connected)
        self._over = True

    def _child_ended(self, pid: int, status: int) -> None:
        worker = self._workers.pop(pid, None)
        if worker is not None:
            self._connections.look(self._worker_pids())
            self._exited(worker, status)
        self._next_step = 0.0

    def _exited(self, worker: Worker, status: int) -> None:
        ended = time.time()
        code, signame = exit_of(status)
        error = worker.error
        if error is not None:
            code, signame = error.pop("code"), None
        elif code is not None and self._containers and self._containers["waits"]:
            number = code - 128  # as the client reports the signal that ended the worker
            if number in signal.valid_signals():
                code, signame = None, signal_name(number)
        bad = code != 0
        if bad and error is None:
            error = error_report(os.path.join(self._folder, worker.name + b".error.json"))
            error = error or full_disk(self._folder)
        kills = oom_kills(self._containers is not None)
        body: Json = {
            **worker.identity(),
            "pid": worker.pid,
            "code": code,
            "signal": signame,
            "stopping": self._stopping,
            "error": error,
            "out_of_memory": bad and kills > self._oom_kills,
        }
        if worker.ranks is not None:
            self._find_ranks(worker, last=True)
            body["ranks"] = worker.ranks.failures() if bad else []
        self._oom_kills = kills
        self._events.append("exited", time=ended, **body)
        if bad and not self._stopping:
            self._diagnosis.want_evidence()

    # Commands

    def _abandoned(self) -> None:
        if not self._started and not self._over:
            self._give_up({"type": "bye"})

    def _obey(self, command: Command, client: socket.socket) -> None:
        if self._over:
            return
        op = command.get("op")
        self._last_command = time.monotonic()
        if op == "ping":
            self._control.send(client, {"type": "pong"})
        elif not self._started:
            if op == "start":
                self._start()
            elif op in ("abort", "stop", "kill"):
                self._give_up({"type": "bye"})
        elif op == "stop":
            grace = command.get("grace")
            if not isinstance(grace, (int, float)) or not 0 <= grace < threading.TIMEOUT_MAX:
                grace = self._grace
            reason = str(command.get("reason") or "asked by the launcher")
            self._stop(reason, float(grace), asked=True)
        elif op == "stacks":
            abort, ras = bool(command.get("abort")), bool(command.get("ras"))
            self._diagnosis.collect_stacks(self._processes(scan=True), abort, ras)
        elif op in ("kill", "abort"):
            self._stop("asked by the launcher", 0.0, asked=True)


def main(stream: BinaryIO, importer: Importer) -> None:
    """The supervisor: its request follows the program on ``stream``."""
    with stream:
        request = json.load(stream)
    supervise(request)


def supervise(request: SupervisorRequest) -> NoReturn:
    """Run the job of ``request``, and end this process."""
    status = 1
    try:
        control = socket.socket(fileno=CONTROL_FD)
        control.set_inheritable(False)
        Supervisor(request, control).run()
        status = 0
    except BaseException:  # noqa: BLE001 - the relay reports what the log says
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(OSError):  # the log's disk is full
            sys.stderr.flush()
        os._exit(status)  # daemon threads and all
