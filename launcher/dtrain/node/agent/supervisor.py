"""The detached process that owns the workers."""

from __future__ import annotations

import binascii
import contextlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time

from dtrain.node.agent.connections import Connections
from dtrain.node.agent.control import CONTROL_FD, control_name, machine_id, peer_of
from dtrain.node.agent.environment import NodeVariables
from dtrain.node.agent.events import Events
from dtrain.node.agent.evidence import error_report
from dtrain.node.agent.flight_recorder import DUMP_LIMIT, FlightRecorders
from dtrain.node.agent.folder import (
    cannot_write,
    check_workdir,
    create,
    discard,
    expand,
    listed,
    open_run,
    save,
    trust_of,
)
from dtrain.node.agent.kernel_log import KernelLog, oom_kills
from dtrain.node.agent.network import reserve_port, share_ports
from dtrain.node.agent.processes import Proc, look, name_list, own_start, reap, send, signal_name
from dtrain.node.agent.ranks import Ranks
from dtrain.node.agent.spawn import missing, search, spawn, why_not_executed
from dtrain.node.agent.stacks import spy
from dtrain.node.agent.sweep import ABORT_LIMIT, Sweep, Tag, adopt_orphans, await_ends, load_prctl
from dtrain.node.agent.wire import RefusedError, encode, raw, shown
from dtrain.node.agent.worker_files import decode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import BinaryIO, Callable

    from dtrain.node.agent.wire import Json
    from dtrain.node.importer import Importer

START_WITHIN = 60.0
"""Seconds, besides the lease, that a prepared job waits for `start`."""
MAX_COMMAND = 1 << 20
"""Bytes of one command."""
SEARCH_LIMIT = 5.0
"""Seconds that the end of a run waits for evidence of why it has ended."""


class Worker:
    __slots__ = ("error", "index", "pid", "rank", "ranks", "role")

    def __init__(self, body: Json) -> None:
        self.role: str = body["role"]
        self.index: int = body["index"]
        self.rank: int | None = body.get("rank")
        self.pid = 0
        self.error: Json | None = None  # why it could not be executed
        self.ranks: Ranks | None = None

    @property
    def name(self) -> bytes:
        return b"%s-%d" % (raw(self.role), self.index)

    def names(self) -> Json:
        """What it is called in events."""
        return {"role": self.role, "index": self.index, "rank": self.rank}


class Supervisor:
    """Owns the workers of one run on this host, from `prepared` to `ended`."""

    def __init__(self, request: Json, relay: socket.socket) -> None:
        self._request = request
        self._launcher: socket.socket | None = relay
        self._folder = raw(request["folder"])
        self._tag = Tag(request["run"], request["host"], self._folder)
        self._workdir = raw(request["absolute_workdir"])
        self._clients: dict[int, tuple[socket.socket, bytearray]] = {}
        self._poll = select.poll()
        self._ports: list[socket.socket] = []  # reserved for the run's life
        self._plan: list[tuple[Worker, list[bytes], dict[bytes, bytes], tuple[int, int]]] = []
        self._workers: dict[int, Worker] = {}
        self._flights: FlightRecorders | None = None
        self._groups: set[int] = set()
        self._sweep: Sweep | None = None
        self._stopping = False
        self._started = False
        self._over = False
        self._search: threading.Thread | None = None
        self._to_search = False  # for evidence, once more
        self._next_step = self._next_scan = 0.0
        self._oom_kills = 0
        self._signal = 0  # that asked us to stop
        self._prctl = load_prctl()
        self._subreaper = adopt_orphans(self._prctl)
        self._connections = Connections(request.get("job_ports") or ())
        self._lease = float(request["lease"])
        self._grace = float(request["grace"])
        self._heard = time.monotonic()

    def run(self) -> None:
        self._wake, waker = socket.socketpair()
        for sock in (self._wake, waker):
            sock.setblocking(False)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._note_signal)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self._poll.register(self._wake, select.POLLIN)
        assert self._launcher is not None
        self._welcome(self._launcher)
        self._say({"type": "up", "pid": os.getpid()})
        try:
            self._prepare()
        except RefusedError as refusal:
            self._give_up(refusal.message)
            return
        self._say(
            {
                "type": "prepared",
                "workdir": self._request["absolute_workdir"],
                "folder": self._request["folder"],
            }
        )
        try:
            while not self._over:
                self._wait(self._tick())
        except BaseException as failure:
            # Not one worker may outlive its supervisor, least of all one that has a bug.
            survivors = self._sweep_now(lambda *_: None)
            if self._started:
                words = "%s: %s" % (type(failure).__name__, failure)
                self._events.append("ended", survivors=name_list(survivors), error=words)
            raise

    def _note_signal(self, signum: int, _frame: object) -> None:
        self._signal = signum

    # Before the start

    def _prepare(self) -> None:
        """Check and reserve everything that the start will need. Raises RefusedError."""
        request = self._request
        trust = trust_of(request)
        try:
            self._folder_fd = open_run(trust, self._folder)
        except OSError as error:
            raise cannot_write(error, self._folder) from None
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        name = control_name(request["run"], request["host"])
        listener.bind(name)
        listener.listen(16)
        listener.setblocking(False)
        self._listener = listener
        self._poll.register(listener, select.POLLIN)

        base = {name: value for name, value in os.environb.items() if name != b"DTRAIN_SETUP"}
        for source in (request["environment"], request.get("secrets") or {}):
            base.update({raw(name): raw(value) for name, value in source.items()})
        self._variables = NodeVariables(self._folder, self._workdir)
        environment = self._environment(base, request)
        self._flights = FlightRecorders(environment, self._workdir, request["world_size"])

        python = self._find_python(request.get("python"), environment)
        script = request.get("script")
        if script is not None and not os.path.isfile(os.path.join(self._workdir, raw(script))):
            where = "" if os.path.isabs(script) else " in %s" % shown(self._workdir)
            remedy = "set `job.workdir` to its folder on this host, or let `job.sync` send it"
            if os.path.isabs(script):
                remedy = "put it there, or let `job.sync` send it and name it without its folder"
            raise RefusedError("script", "script %s not found%s" % (script, where), remedy)
        # After setup, which may change the folder.
        check_workdir(trust, self._workdir, script)
        for port in request.get("ports") or ():
            self._ports += reserve_port(int(port))
        try:
            self._events = Events(self._folder_fd)
            save(b"runtime.zip", self._folder_fd, binascii.a2b_base64(request["runtime"]))
            for body in request["processes"]:
                self._plan.append(self._planned(body, python, base))
        except OSError as error:
            raise cannot_write(error, self._folder) from None
        record = {
            "pid": os.getpid(),
            "start": own_start(),
            "machine": machine_id(),
            "folder": request["folder"],
            "socket": name.decode("utf-8", "surrogateescape"),
        }
        save(b"supervisor", self._folder_fd, encode(record))

    def _environment(
        self, base: dict[bytes, bytes], body: Json | None = None
    ) -> dict[bytes, bytes]:
        """The whole environment of a process; without one, what all of them share."""
        body = body or {}
        given = {raw(name): raw(value) for name, value in body.get("environment", {}).items()}
        environment = {**base, **given}
        shared, own = self._request.get("node_variables"), body.get("node_variables")
        self._variables.complete(environment, {**(shared or {}), **(own or {})})
        # Whatever the launcher says: by these the processes of a run are found.
        environment.update(self._tag.environment)
        return environment

    def _find_python(self, python: str | None, environment: dict[bytes, bytes]) -> bytes | None:
        if python is None:
            return None
        wanted = expand(python) if python.startswith("~/") else raw(python)
        places = [os.path.join(self._workdir, place) for place in search(wanted, environment)]
        for place in places:
            if os.path.isfile(place) and os.access(place, os.X_OK):
                return place
        where = "" if b"/" in wanted else " on PATH (%s)" % shown(environment.get(b"PATH", b""))
        there = any(os.path.isfile(place) for place in places)
        raise RefusedError(
            "python",
            "python %s %s%s"
            % (python, "may not be executed" if there else "not found", where or " on this host"),
            "set `cluster.python` to an interpreter of this host, or put it on PATH in `job.setup`",
        )

    def _planned(
        self, body: Json, python: bytes | None, base: dict[bytes, bytes]
    ) -> tuple[Worker, list[bytes], dict[bytes, bytes], tuple[int, int]]:
        worker = Worker(body)
        environment = self._environment(base, body)
        argv = [raw(word) for word in body["argv"]]
        if python is not None and body["argv"][0] == self._request["python"]:
            argv[0] = python
        if worker.role == "torchrun":
            path = os.path.join(self._folder, worker.name)
            worker.ranks = Ranks(path, argv, body["ranks"], self._request["world_size"])
        out, err = (
            create(worker.name + suffix, self._folder_fd, os.O_APPEND)
            for suffix in (b".out", b".err")
        )
        return worker, argv, environment, (out, err)

    def _give_up(self, message: Json) -> None:
        """End a run that has not started: nothing stays behind. ``message`` says why."""
        self._sweep_now(self._child_ended)  # what setup left running
        discard(self._folder, [raw(path) for path in self._request["made"]])
        self._say(message)
        self._over = True

    # The life of the run

    def _start(self) -> None:
        self._started = True
        share_ports(self._ports)
        self._kernel_log = KernelLog()
        self._oom_kills = oom_kills()
        for worker, argv, environment, outputs in self._plan:
            worker.pid, failure = spawn(
                argv, environment, self._workdir, outputs, prctl=self._prctl
            )
            if failure is not None:
                worker.error = {
                    "message": why_not_executed(failure, argv[0], environment),
                    "traceback": "",
                    "time": time.time(),
                    "code": 127 if missing(failure) else 126,
                }
            self._workers[worker.pid] = worker
            self._groups.add(worker.pid)
            for fd in outputs:
                os.close(fd)
            self._events.append("started", **worker.names(), pid=worker.pid)
        self._plan.clear()

    def _tick(self) -> float | None:
        """Do what is due by the clock. Seconds until something is due again."""
        now = time.monotonic()
        if self._signal:
            signame, self._signal = signal_name(self._signal), 0
            if not self._started:
                self._give_up(RefusedError("agent", "stopped by " + signame).message)
                return 0.0
            self._stop("the supervisor got " + signame, self._grace)
        if self._to_search and not self._searching:
            search = threading.Thread(target=self._tell_evidence, daemon=True)
            with contextlib.suppress(RuntimeError):  # too many threads: at the end, then
                search.start()
                self._search, self._to_search = search, False
        if not self._started:
            left = self._heard + START_WITHIN + self._lease - now
            if left <= 0:
                waited = START_WITHIN + self._lease
                reason = "no start command came within %d seconds" % waited
                self._give_up(RefusedError("agent", reason).message)
            return max(left, 0.0)
        if self._sweep is None and not self._workers:
            # Everything has exited; what the workers left behind goes too.
            self._begin_sweep(self._grace)
        due: list[float] = []
        if self._sweep is not None:
            if now >= self._next_step:
                pause = self._sweep.step()
                if pause is None:
                    self._finish(self._sweep.survivors)
                    return 0.0
                self._next_step = time.monotonic() + pause
            due.append(self._next_step)
        elif self._request["on_disconnect"] == "stop":
            left = self._heard + self._lease - now
            if left <= 0:
                self._stop("no launcher for %g seconds" % self._lease, self._grace)
                return 0.0
            due.append(self._heard + self._lease)
        if self._workers:
            pause = self._connections.watch(self._workers)
            if pause is not None:
                due.append(time.monotonic() + pause)
        torchruns = [worker for worker in self._workers.values() if worker.ranks is not None]
        if torchruns:
            if now >= self._next_scan:
                pause = min(self._find_ranks(worker) for worker in torchruns)
                self._next_scan = time.monotonic() + pause
            due.append(self._next_scan)
        return max(min(due) - time.monotonic(), 0.0) if due else None

    def _find_ranks(self, worker: Worker, last: bool = False) -> float:
        """Report ranks that torchrun has started. Seconds until it is worth looking again."""
        assert worker.ranks is not None
        found, pause = worker.ranks.scan(self._tag, last)
        for rank in found:
            self._events.append("rank", role=worker.role, index=worker.index, **rank)
        return pause

    def _ask_where(self, abort: bool) -> None:
        """Find out where every worker is, and every rank of a torchrun; go on meanwhile."""
        asked: list[tuple[Json, Proc]] = []
        for worker in self._workers.values():
            ranks = worker.ranks.living(self._tag) if worker.ranks is not None else {}
            who = [
                (pid, {"role": "worker", "index": rank, "rank": rank})
                for rank, pid in ranks.items()
            ]
            # A torchrun without ranks waits for other torchruns.
            found = [(names, look(pid)) for pid, names in who or [(worker.pid, worker.names())]]
            asked += [(names, proc) for names, proc in found if proc is not None]
        threading.Thread(target=self._tell_where, args=(asked, abort), daemon=True).start()

    def _tell_where(self, asked: list[tuple[Json, Proc]], abort: bool) -> None:
        """Where workers are, as py-spy and torch's flight recorder see it. Where py-spy does not
        and they may be ended, Python itself writes it to their stderr: its fault handler, on
        SIGABRT."""
        ranks = {names["rank"] for names, _ in asked}
        recorded = {rank for rank in ranks if self._flights and self._flights.ask(rank)}
        stacks = spy([proc.pid for _, proc in asked])
        for names, proc in asked:
            if proc.pid in stacks:
                self._events.append("stack", **names, text=stacks[proc.pid])
        deadline = time.monotonic() + DUMP_LIMIT
        while recorded and time.monotonic() < deadline:
            recorded -= self._tell_collectives()
            time.sleep(0.05)
        if abort:
            aborted = [proc for _, proc in asked if proc.pid not in stacks]
            for proc in aborted:
                send(proc, signal.SIGABRT)
            await_ends(aborted, ABORT_LIMIT)
        self._events.append("told")

    def _tell_collectives(self) -> set[int]:
        """Tell of the calls of ranks whose flight recorders have written them by now: which."""
        fresh = self._flights.fresh() if self._flights is not None else []
        for rank, groups in fresh:
            self._events.append("collectives", rank=rank, groups=groups)
        return {rank for rank, _ in fresh}

    @property
    def _searching(self) -> bool:
        return self._search is not None and self._search.is_alive()

    def _tell_evidence(self) -> None:
        """Tell what the kernel and torch have written of a bad end by now. It may take seconds."""
        lines = self._kernel_log.read()
        if lines:
            # In the order in which nvidia-smi numbers them.
            gpus = sorted(map(shown, listed(b"/proc/driver/nvidia/gpus")))
            self._events.append("kernel", lines=lines, gpus=gpus)
        self._tell_collectives()

    def _stop(self, reason: str, grace: float) -> None:
        if not self._stopping:
            self._stopping = self._to_search = True
            self._events.append("stopping", reason=reason)
        if self._sweep is None:
            self._begin_sweep(grace)
        else:
            self._sweep.kill_at = min(self._sweep.kill_at, time.monotonic() + grace)
            self._next_step = 0.0

    def _begin_sweep(self, grace: float) -> None:
        self._sweep = Sweep(self._tag, grace, self._child_ended, self._subreaper, self._groups)
        self._next_step = 0.0

    def _sweep_now(self, take: Callable[[int, int], None]) -> list[Proc]:
        return Sweep(self._tag, 0.0, take, self._subreaper, self._groups).finish()

    def _finish(self, survivors: list[Proc]) -> None:
        until = time.monotonic() + SEARCH_LIMIT
        if self._search is not None:
            self._search.join(SEARCH_LIMIT)
        if self._to_search and not self._searching:
            last = threading.Thread(target=self._tell_evidence, daemon=True)
            with contextlib.suppress(RuntimeError):  # too many threads
                last.start()
                last.join(max(0.0, until - time.monotonic()))
        connected = self._connections.found
        self._events.append("ended", survivors=name_list(survivors), connected=connected)
        self._over = True

    def _child_ended(self, pid: int, status: int) -> None:
        worker = self._workers.pop(pid, None)
        if worker is not None:
            self._connections.look(self._workers)
            self._exited(worker, status)
        self._next_step = 0.0

    def _exited(self, worker: Worker, status: int) -> None:
        ended = time.time()
        code: int | None = None
        signame: str | None = None
        error = worker.error
        if error is not None:
            code = error.pop("code")
        elif os.WIFSIGNALED(status):
            signame = signal_name(os.WTERMSIG(status))
        else:
            code = os.WEXITSTATUS(status)
        bad = code != 0
        if bad and error is None:
            error = error_report(os.path.join(self._folder, worker.name + b".error.json"))
        kills = oom_kills()
        body: Json = {
            **worker.names(),
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
            self._to_search = True

    # What comes in

    def _wait(self, timeout: float | None) -> None:
        for fd, _ in self._poll.poll(None if timeout is None else timeout * 1000):
            if fd == self._wake.fileno():
                with contextlib.suppress(BlockingIOError):
                    self._wake.recv(4096)
                reap(self._child_ended)
            elif fd == self._listener.fileno():
                try:
                    client, _ = self._listener.accept()
                except OSError:
                    continue
                if peer_of(client)[1] == os.geteuid():
                    self._welcome(client)
                else:
                    client.close()
            elif fd in self._clients:
                self._hear(fd)

    def _welcome(self, client: socket.socket) -> None:
        client.setblocking(False)
        self._clients[client.fileno()] = client, bytearray()
        self._poll.register(client, select.POLLIN)

    def _hear(self, fd: int) -> None:
        client, pending = self._clients[fd]
        try:
            data = client.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._poll.unregister(fd)
            del self._clients[fd]
            client.close()
            if client is self._launcher:
                self._launcher = None
                if not self._started:
                    self._give_up({"type": "bye"})
            return
        pending += data
        *lines, rest = pending.split(b"\n")
        pending[:] = rest[:MAX_COMMAND]
        for line in lines:
            command = decode(bytes(line))
            if command is not None and not self._over:
                self._obey(command, client)

    def _obey(self, command: Json, client: socket.socket) -> None:
        op = command.get("op")
        self._heard = time.monotonic()
        if op == "ping":
            self._send(client, {"type": "pong"})
        elif not self._started:
            if op == "start":
                self._start()
            elif op in ("abort", "stop", "kill"):
                self._give_up({"type": "bye"})
        elif op == "stop":
            grace = command.get("grace")
            if not isinstance(grace, (int, float)) or not 0 <= grace < threading.TIMEOUT_MAX:
                grace = self._grace
            self._stop(str(command.get("reason") or "asked by the launcher"), float(grace))
        elif op == "stacks":
            self._ask_where(bool(command.get("abort")))
        elif op in ("kill", "abort"):
            self._stop(str(command.get("reason") or "asked by the launcher"), 0.0)

    def _say(self, message: Json) -> None:
        for client, _ in self._clients.values():
            self._send(client, message)

    def _send(self, client: socket.socket, message: Json) -> None:
        with contextlib.suppress(OSError):
            client.send(encode(message) + b"\n")


def main(stream: BinaryIO, importer: Importer) -> None:
    """The supervisor: its request follows the program on ``stream``."""
    with stream:
        request = json.load(stream)
    control = socket.socket(fileno=CONTROL_FD)
    control.set_inheritable(False)
    Supervisor(request, control).run()
    sys.stderr.flush()
    os._exit(0)  # daemon threads and all
