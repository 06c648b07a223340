"""One host's side of a session: connect, prepare, follow, and reconnect.

A link has two threads. The reader connects, sends the working folder, starts the agent and reads
what the agent's relay sends until it says goodbye. The writer sends the controller's orders and a
ping every few seconds, by which the node knows that somebody still watches. Neither decides
anything: they post events, and the controller answers with orders.
"""

from __future__ import annotations

import queue
import random
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from dtrain import machine, protocol
from dtrain.cause import Failure
from dtrain.diagnostics import ConnectError, DtrainError, NodeError, PortBusyError, PrepareError
from dtrain.journal import Journal
from dtrain.launchplan import HostPlan, LaunchPlan
from dtrain.logs.store import LogWriter, RunFolder, StorageError, Stream
from dtrain.node.boot import TOO_OLD, boot_command
from dtrain.session.observer import Observer
from dtrain.sync import Tree, send
from dtrain.transport.contract import Connection, RemoteProcess, Transport

PING_SECONDS = 5.0
RECONNECT_SECONDS = 60.0
"""A host that cannot be reached again for so long is lost to the run."""


@dataclass(frozen=True, slots=True)
class Post:
    """A machine event with what the report will want to know of it."""

    event: machine.Event
    problem: DtrainError | None = None
    failures: tuple[Failure, ...] = ()


@dataclass(frozen=True, slots=True)
class Run:
    """What all links of one launch share."""

    name: str
    plan: LaunchPlan
    movable_port: bool
    """Whether a busy port only means that the next one is tried."""
    base: Path
    """Folder of the cluster file: relative working folders on this machine start here."""
    secrets: Mapping[str, str] = field(repr=False)
    transport: Transport
    tree: Tree | None
    folder: RunFolder
    journal: Journal
    observer: Observer
    post: Callable[[Post], None]


class Link:
    """The way to one host. Methods may be called from any thread and never block."""

    def __init__(self, run: Run, part: HostPlan) -> None:
        self.host = part.host.name
        self.problem: NodeError | None = None
        self._run = run
        self._part = part
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._process: RemoteProcess | None = None
        self._orders: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._standing: dict[str, Any] | None = None
        self._begun = False
        self._started = False
        self._given_up = False
        self._clean = False
        self._full = False
        self._clock_offset = 0.0
        self._streams: dict[int, tuple[LogWriter, Stream]] = {}
        self._offsets: dict[str, int] = {}
        self._reader = threading.Thread(
            target=self._guarded, args=(self._read,), name=f"{self.host} reader", daemon=True
        )
        self._writer = threading.Thread(
            target=self._guarded, args=(self._write,), name=f"{self.host} writer", daemon=True
        )

    def begin(self) -> None:
        self._reader.start()

    def start(self) -> None:
        """Let the prepared host start its workers."""
        self._started = True
        self._state("running")
        self._orders.put({"op": "start"})

    def stop(self, grace: float) -> None:
        """Ask the host to stop its workers: TERM, ``grace`` seconds, KILL."""
        self._state("stopping")
        self._order({"op": "stop", "grace": grace})

    def kill(self) -> None:
        """Have the host kill its workers at once."""
        self._order({"op": "kill"})

    def abort(self) -> None:
        """Forget a host that has not started; it answers with ``Ended``."""
        with self._lock:
            self._given_up = True
            begun = self._begun
        if begun:
            self._orders.put({"op": "abort"})
        else:
            # Still connecting: the reader finds out, and starts nothing there.
            self._run.post(Post(machine.Ended(self.host)))

    def close(self) -> None:
        """Let go of the host, whatever it is doing."""
        with self._lock:
            self._given_up = True
            connection = self._connection
        self._orders.put(None)
        if connection is not None:
            connection.close()

    def drained(self, timeout: float) -> bool:
        """Whether everything that the host had to say has arrived, after waiting so long."""
        self._reader.join(timeout)
        return not self._reader.is_alive()

    # The two threads ---------------------------------------------------------------------------

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:  # noqa: BLE001  a thread's fault must end the run, not vanish with it
            fault = DtrainError(f"{self.host}: a fault in dtrain itself:\n{traceback.format_exc()}")
            self._run.post(Post(machine.Broken(), fault))
            self.kill()
            self._run.post(Post(machine.Lost(self.host)))

    def _write(self) -> None:
        while True:
            try:
                order = self._orders.get(timeout=PING_SECONDS)
            except queue.Empty:
                order = {"op": "ping"}
            if order is None:
                return
            process = self._process
            if process is not None:
                try:
                    process.write(protocol.encode_command(order))
                except ConnectError:
                    # The reader sees the same, reconnects, and repeats a standing order.
                    continue

    def _read(self) -> None:
        try:
            process = self._launch()
        except NodeError as error:
            self._refuse(error)
            return
        if process is None:
            return
        while not self._follow(process):
            reopened = self._reopen()
            if reopened is None:
                return
            process = reopened

    # Starting ----------------------------------------------------------------------------------

    def _launch(self) -> RemoteProcess | None:
        """The agent, with its request sent; None when the launch was called off meanwhile."""
        run, part = self._run, self._part
        self._state("connecting")
        connection = self._connect()
        if connection is None:
            return None
        workdir = self._workdir()
        if run.tree is not None:
            self._state("syncing")
            result = send(connection, part.host, run.tree, workdir, python=self._python)
            for notice in result.notices:
                run.observer.notice(f"{self.host}: {notice}")
            workdir = result.tree_path
        with self._lock:
            if self._given_up:
                return None
            self._begun = True
        self._state("preparing")
        process = self._start_agent(connection)
        self._writer.start()
        process.write(protocol.encode_command(self._request(workdir)))
        return process

    def _connect(self) -> Connection | None:
        connection = self._run.transport.connect(self._part.host)
        with self._lock:
            if not self._given_up:
                self._connection = connection
                return connection
        connection.close()
        return None

    def _start_agent(self, connection: Connection) -> RemoteProcess:
        process = connection.start(boot_command(self._python, self._run.name))
        self._process = process
        source = resources.files("dtrain.node").joinpath("agent.py").read_bytes()
        process.write(b"%d\n%b" % (len(source), source))
        return process

    @property
    def _python(self) -> str:
        """The interpreter that runs the agent: the workers', unless setup has yet to find it."""
        part = self._part
        python = part.processes[0].argv[0] if part.processes else part.host.python
        return "python3" if self._run.plan.job.setup and "/" not in python else python

    def _request(self, workdir: str) -> dict[str, Any]:
        run, part = self._run, self._part
        job = run.plan.job
        return {
            "op": "launch",
            "protocol": protocol.VERSION,
            "run": run.name,
            "host": self.host,
            "run_dir": run.plan.run_dir,
            "workdir": workdir,
            "script": job.script,
            "python": part.processes[0].argv[0] if part.processes else part.host.python,
            "setup": list(job.setup),
            "environment": dict(part.environment),
            "secrets": dict(run.secrets),
            "processes": [
                {
                    "role": process.role,
                    "index": process.index,
                    "rank": process.rank,
                    "argv": list(process.argv),
                    "environment": dict(process.environment),
                    "service": process.service,
                }
                for process in part.processes
            ],
            "ports": list(part.ports),
            "route_to": part.route_to,
            "on_disconnect": job.on_disconnect,
            "lease": job.lease,
        }

    def _workdir(self) -> str:
        workdir = self._part.workdir
        if self._part.host.transport == "local" and not workdir.startswith("~"):
            return str(self._run.base / workdir)
        return workdir

    def _refuse(self, error: NodeError) -> None:
        self.problem = error
        self._clean = True
        if not (isinstance(error, PortBusyError) and self._run.movable_port):
            self._state("failed", error.reason)
        with self._lock:
            called_off = self._given_up and not self._begun
        if not called_off:
            self._run.post(Post(machine.Refused(self.host), error))

    # Following ---------------------------------------------------------------------------------

    def _follow(self, process: RemoteProcess) -> bool:
        """Take in what the relay sends. True when there is nothing more to come from this host,
        False when the connection broke and the run goes on."""
        decoder = protocol.FrameDecoder()
        last = ""
        try:
            while data := process.read():
                for frame in decoder.feed(data):
                    if isinstance(frame, protocol.Data):
                        self._keep(frame)
                    else:
                        last = frame.body["type"]
                        self._take(frame.body)
        except ConnectError as error:
            return self._broken(error)
        except protocol.ProtocolError as error:
            return self._broken(self._agent_failed(str(error), process, decoder))
        if last == "bye" or (self._given_up and not self._started):
            self._ended()
            return True
        if self._clean:
            return True
        return self._broken(self._agent_failed("it ended", process, decoder))

    def _broken(self, error: NodeError) -> bool:
        self.problem = error
        if self._started:
            return self._given_up
        if self._given_up:
            self._ended()
        else:
            self._refuse(error)
        return True

    def _agent_failed(
        self, what: str, process: RemoteProcess, decoder: protocol.FrameDecoder
    ) -> NodeError:
        """Why the agent's end of the channel is not what it should be."""
        python = self._python
        try:
            status = process.wait(timeout=5)
        except (TimeoutError, ConnectError):
            status = None
        said = (process.stderr() + b"\n" + decoder.noise).decode(errors="replace").strip()
        attempted = f"starting the agent with {python}"
        if status == TOO_OLD:
            reason = said.splitlines()[-1] if said else "this Python is too old"
            hint = "dtrain needs Python 3.8 or newer on its nodes: name one with cluster.python"
            return PrepareError(self.host, attempted, reason, hint=hint)
        if status in (126, 127):
            hint = "install Python there, or name the interpreter with cluster.python"
            reason = f"{python} was not found or cannot be run" + (f" ({said})" if said else "")
            return PrepareError(self.host, attempted, reason, hint=hint)
        reason = f"{what}, with status {status}" if status is not None else what
        return PrepareError(
            self.host,
            attempted,
            f"{reason}: {said[-2000:]}" if said else reason,
            hint="a login script that prints, or replaces the shell, can be the reason",
        )

    def _reopen(self) -> RemoteProcess | None:
        """A new relay on the running job; None when the host is given up."""
        deadline = time.monotonic() + RECONNECT_SECONDS
        delay = 0.25
        problem = self.problem
        self._state("unreachable", problem.reason if problem else "")
        while not self._given_up and time.monotonic() < deadline:
            # Jitter, so that a switch that comes back is not met by every host at once.
            time.sleep(delay * random.uniform(0.5, 1.0))  # noqa: S311
            delay = min(delay * 2, 5.0)
            try:
                connection = self._connect()
                if connection is None:
                    return None
                process = self._start_agent(connection)
                process.write(protocol.encode_command(self._attachment()))
            except NodeError as error:
                self.problem = problem = error
                continue
            self._state("stopping" if self._standing else "running")
            if self._standing is not None:
                self._orders.put(self._standing)
            return process
        if not self._clean:
            self._run.post(Post(machine.Lost(self.host), problem))
        return None

    def _attachment(self) -> dict[str, Any]:
        run = self._run
        return {
            "op": "attach",
            "protocol": protocol.VERSION,
            "run": run.name,
            "host": self.host,
            "run_dir": run.plan.run_dir,
            "offsets": self._offsets,
        }

    def _keep(self, frame: protocol.Data) -> None:
        if self._full:
            return
        writer, stream = self._streams[frame.stream]
        try:
            size = writer.append(frame.offset, frame.payload)
        except StorageError as error:
            # The job has to be stopped, and for that the host's events are still wanted.
            self._full = True
            self._run.post(Post(machine.Broken(), error))
            return
        self._offsets[stream.path.name] = size
        self._run.observer.output(stream, size)

    def _take(self, body: dict[str, Any]) -> None:
        run = self._run
        match body["type"]:
            case "hello":
                self._clock_offset = time.time() - body["time"]
                run.journal.write(time.time(), "hello", **_without_type(body), node=self.host)
            case "prepared":
                self._state("ready")
                run.post(Post(machine.Prepared(self.host)))
            case "refused":
                self._refuse(self._refusal(body))
            case "stream":
                stream = run.folder.stream(
                    self.host,
                    body["name"],
                    role=body["role"],
                    index=body["index"],
                    rank=body["rank"],
                )
                try:
                    self._streams[body["id"]] = (LogWriter(stream), stream)
                except StorageError as error:
                    self._full = True
                    run.post(Post(machine.Broken(), error))
            case "event":
                self._offsets["events"] = body["offset"]
                run.journal.write(time.time(), "node", host=self.host, node=body["event"])
                self._happened(body["event"])
            case "lost":
                reason = body.get("reason", "the supervisor died")
                self.problem = PrepareError(
                    self.host,
                    "running the job",
                    reason,
                    hint="something on that host ended it; what it had started was ended too",
                )
                self._clean = True
                run.post(Post(machine.Lost(self.host), self.problem))

    def _refusal(self, body: dict[str, Any]) -> PrepareError:
        kind = PortBusyError if body.get("what") == "port" else PrepareError
        attempted = "preparing the job"
        return kind(self.host, attempted, body["reason"], hint=body.get("hint", ""))

    def _happened(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "exited":
                failed = event.get("code") != 0
                worker = machine.Worker(self.host, event["role"], event["index"])
                failures = self._failures(event) if failed and not event.get("stopping") else ()
                self._run.post(Post(machine.Exited(worker, failed), failures=failures))
            case "ended":
                self._ended(event.get("survivors") or [])
            case "stopping" if reason := event.get("reason"):
                self._run.journal.write(time.time(), "stopping", host=self.host, reason=reason)

    def _failures(self, event: dict[str, Any]) -> tuple[Failure, ...]:
        """What an ``exited`` event says of the process, or of the ranks that torchrun ran."""
        if ranks := event.get("ranks"):
            return tuple(
                Failure(
                    host=self.host,
                    role="worker",
                    index=rank["rank"],
                    rank=rank["rank"],
                    time=float(rank.get("time") or event["time"]) + self._clock_offset,
                    code=rank.get("exitcode"),
                    signal=rank.get("signal"),
                    message=rank.get("message") or "",
                    traceback=rank.get("traceback") or "",
                )
                for rank in ranks
            )
        error = event.get("error") or {}
        return (
            Failure(
                host=self.host,
                role=event["role"],
                index=event["index"],
                rank=event.get("rank"),
                time=event["time"] + self._clock_offset,
                code=event.get("code"),
                signal=event.get("signal"),
                message=error.get("message") or "",
                traceback=error.get("traceback") or "",
                pid=event.get("pid"),
                out_of_memory=bool(event.get("out_of_memory")),
            ),
        )

    def _ended(self, survivors: list[dict[str, Any]] | None = None) -> None:
        if self._clean:
            return
        self._clean = True
        self._state("ended")
        problem = None
        if survivors:
            names = ", ".join(f"{each['name']} (pid {each['pid']})" for each in survivors)
            problem = PrepareError(
                self.host,
                "ending the job's processes",
                f"they do not die: {names}",
                hint="a process in uninterruptible sleep ends when its driver or disk answers",
            )
        self._run.post(Post(machine.Ended(self.host), problem))

    def _order(self, order: dict[str, Any]) -> None:
        self._standing = order
        self._orders.put(order)

    def _state(self, state: str, detail: str = "") -> None:
        self._run.observer.host_state(self.host, state, detail)
        self._run.journal.write(time.time(), "host", host=self.host, state=state, detail=detail)


def _without_type(body: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in body.items() if key not in ("type", "time", "event")}
