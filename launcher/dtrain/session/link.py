"""One host's side of a session: connect, prepare, follow, and reconnect.

Each link runs two threads. The reader connects, runs the preflight checks, syncs files, starts the
agent, and reads relay messages until `bye`. The writer sends the controller's commands and a ping
every 5 s: a node that receives none assumes that the launcher is gone, and a relay that answers
none is replaced. Links make no decisions: they post events, and the controller replies with
commands.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import queue
import random
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Any

from dtrain.diagnostics import (
    AnswerError,
    ConnectError,
    DtrainError,
    InternalError,
    NodeError,
    PortBusyError,
    PrepareError,
)
from dtrain.failures import collectives
from dtrain.failures.cause import Failure
from dtrain.failures.collectives import Group
from dtrain.failures.kernel import KernelMessage, understand
from dtrain.launchplan.plan import HostPlan, LaunchPlan
from dtrain.messages import agent as messages
from dtrain.messages.decode import ProtocolError
from dtrain.messages.sequence import Sequence
from dtrain.node import protocol
from dtrain.node.boot import TOO_OLD
from dtrain.node.runtime_archive import runtime_archive
from dtrain.runs import journal
from dtrain.runs.journal import Journal
from dtrain.runs.log_store import LogWriter, RunFolder, StorageError, Stream
from dtrain.runs.progress import Progress, speaker
from dtrain.session import agent, machine
from dtrain.session.forward import Forward
from dtrain.session.inspection import Inspection
from dtrain.session.observer import Observer
from dtrain.session.outage import Outage
from dtrain.spec.model import Job
from dtrain.sync import SyncResult, Tree, send
from dtrain.transport.contract import Connection, RemoteProcess, Transport

PING_SECONDS = 5.0
UNANSWERED, UNANSWERED_FIRST, UNANSWERED_STOP = 4, 12, 3
"""Unanswered pings after which a relay is replaced: normally, before its first message, and once
the job has to stop."""
SUPERVISOR_SILENCE = 15.0
"""Seconds without an answer after which a supervisor may be stopped."""
MAX_NOTICE, MAX_NOTICES = 500, 20
"""Characters of one notice of a relay, and how many are shown."""
BETWEEN_REPORTS = 10.0
"""Seconds from one report of progress in the journal to the next."""
MAX_OFFSETS = 10_000
"""Files of a host whose offsets are remembered; a hostile host could name any number."""
MAX_KERNEL_MESSAGES = 1000
LAST_ORDERS = 1.0
"""Seconds that orders given just before the end have to get onto the wire."""


@dataclass(frozen=True, slots=True)
class Post:
    """A machine event with what the report will want to know of it."""

    event: machine.Event | None
    problem: DtrainError | None = None
    failures: tuple[Failure, ...] = ()


@dataclass(frozen=True, slots=True)
class Run:
    """What all links of one launch share."""

    name: str
    plan: LaunchPlan
    attempt: int
    """Counted from 1."""
    movable_port: bool
    """Whether a busy port only means that another one is tried."""
    base: Path
    """Folder of the cluster file: relative working folders on this machine start here."""
    secrets: Mapping[str, str] = field(repr=False)
    transport: Transport
    tree: Tree | None
    folder: RunFolder
    journal: Journal
    observer: Observer
    inspection: Inspection | None
    """Where hosts are looked at before anything is prepared; None where that has been done."""
    tensorboard: bool
    """Whether somebody wants to see the job's TensorBoard on this machine."""
    post: Callable[[Post], None]

    def notice(self, text: str) -> None:
        """Tell a person, now or when they look at the journal."""
        self.observer.notice(text)
        self.journal.write(time.time(), journal.Notice(text))


class Stage(Enum):
    """How far a host has come. It only ever goes forward."""

    CONNECTING = auto()
    """Nothing that outlives the connection is there yet."""
    BEGUN = auto()
    """It has been asked to prepare, and perhaps to start."""
    OVER = auto()
    """The controller knows how it ended."""


class Link:
    """The way to one host. Methods may be called from any thread and never block for long."""

    def __init__(self, run: Run, part: HostPlan) -> None:
        self.host = part.host.name
        self.synced: SyncResult | None = None
        self.clean = False
        """Whether nothing is left there, though nobody knows how it ended."""
        self.gone = False
        """Whether the host knows nothing of the run."""
        self.heard = 0.0
        """When a worker last wrote or told something (`time.monotonic`)."""
        self.stacks: dict[str, str] = {}
        """What py-spy said of workers, by rank, or role and index."""
        self.collectives: dict[int, list[Group]] = {}
        """What the flight recorders of ranks hold."""
        self.told = False
        """Whether the host has told all that it can of where its workers are."""
        self.kernel: list[KernelMessage] = []
        """What the host's kernel has said of trouble since the start."""
        self.step: int | None = None
        """The last step of progress that a worker of this host told of."""
        self._run = run
        self._part = part
        self._sequence = Sequence(part, run.plan.world_size)
        self._lock = threading.Lock()
        self._stage = Stage.CONNECTING
        self._called_off = False
        self._closed = False
        self._started = False
        self._attached = False
        self._lingering = False
        self._told_all = False
        self._reported = ""
        """The host's last state, as observers know it."""
        self._full = False
        self._connection: Connection | None = None
        self._process: RemoteProcess | None = None
        self._orders: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._standing: dict[str, Any] | None = None
        self._outage = Outage()
        self._pause = threading.Event()
        self._journal_at = 0.0
        self._journaled = 0
        """How far the host's events are in the journal already."""
        self._clock_offset = math.inf
        self._tensorboard: Forward | None = None
        self._streams: dict[int, tuple[LogWriter, Stream]] = {}
        self._offsets: dict[str, int] = {}
        self._relay: int | None = None
        """The relay's process."""
        self._unanswered = 0
        """Pings sent while the reader waits for the relay."""
        self._waiting = False
        self._gave_up_relay = False
        self._silent_supervisor = False
        self._notices = 0
        self._reader, self._writer = self._threads()

    def _threads(self) -> tuple[threading.Thread, threading.Thread]:
        reader, writer = (
            threading.Thread(
                target=self._guarded, args=(work,), name=f"{self.host} {name}", daemon=True
            )
            for work, name in ((self._read, "reader"), (self._write, "writer"))
        )
        return reader, writer

    def begin(self) -> None:
        self._reader.start()

    def attach(self, offsets: Mapping[str, int]) -> None:
        """Take up a host whose workers were started before. ``offsets`` says how much of each
        of its streams is here already."""
        self._stage = Stage.BEGUN
        self._started = self._attached = True
        self._offsets.update(offsets)
        # Whatever has happened is told again, because it makes the state; not journaled again.
        self._journaled = self._offsets.pop("events", 0)
        self._state("attaching")
        self._writer.start()
        self._reader.start()

    def start(self) -> None:
        """Let the prepared host start its workers."""
        self._started = True
        self._state("running")
        self._order({"op": "start"})

    def stop(self, grace: float, reason: str) -> None:
        """Ask the host to stop its workers: TERM, ``grace`` seconds, KILL. ``reason`` is for
        whoever takes up the run after us."""
        self._state("stopping")
        self._order({"op": "stop", "grace": grace, "reason": reason})

    def tell_stacks(self, *, abort: bool) -> None:
        """Ask where the host's workers are; ``abort`` allows to end them for it."""
        self.told = False
        self.stacks, self.collectives = {}, {}
        self._orders.put({"op": "stacks", "abort": abort})

    def kill(self) -> None:
        """Have the host kill its workers at once."""
        self._order({"op": "kill"})

    def abort(self) -> None:
        """Forget a host that has not started; it answers with ``Ended``."""
        with self._lock:
            self._called_off = True
            begun = self._stage is not Stage.CONNECTING
            connection = self._connection
        if begun:
            self._orders.put({"op": "abort"})
            return
        # The reader finds out, and starts nothing there.
        if connection is not None:
            connection.close()
        self._over(machine.HostEnded(self.host))

    def linger(self) -> None:
        """Instead of `begin`: keep trying to reach the host, for as long as it takes, only to end
        what it has of the run."""
        self._lingering = True
        self._standing = {"op": "kill"}
        self.attach({})

    @property
    def stray(self) -> tuple[str, int]:
        """The host, and the attempt of which it may still run something."""
        return self.host, self._run.attempt

    @property
    def over(self) -> bool:
        """Whether the host has told how it ended."""
        return self._stage is Stage.OVER

    @property
    def reachable(self) -> bool:
        """Whether it is not known to be cut off."""
        return self._outage.reachable

    def let_go(self) -> None:
        """Give no more orders than have been given, and take up no connection any more."""
        with self._lock:
            self._closed = self._called_off = True
        self._pause.set()
        if self._tensorboard is not None:
            self._tensorboard.close()
        self._orders.put(None)

    def close(self, timeout: float) -> None:
        """End the connection of a host that was let go of, once the orders given are on their way
        or so many seconds have passed."""
        if self._writer.is_alive():
            self._writer.join(timeout)
        with self._lock:
            connection = self._connection
        if connection is not None:
            connection.close()

    def received(self) -> dict[str, int]:
        """Bytes of each stream that have come."""
        return {name: size for name, size in self._offsets.copy().items() if name != "events"}

    def drained(self, timeout: float) -> bool:
        """Whether everything that the host had to say has arrived, after waiting so long."""
        with self._lock:
            if self._stage is Stage.CONNECTING or (self._called_off and self._process is None):
                return True
        self._reader.join(timeout)
        return not self._reader.is_alive()

    # The two threads ---------------------------------------------------------------------------

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:  # noqa: BLE001  a thread's fault must end the run, not vanish with it
            report = self._run.folder.path / "fault.txt"
            with contextlib.suppress(OSError):
                report.write_text(traceback.format_exc())
            fault = InternalError(f"a fault in dtrain itself; please report the file {report}")
            self._run.post(Post(machine.LauncherFailed(), fault))
            self.kill()
            self._over(machine.HostLost(self.host))

    def _write(self) -> None:
        while True:
            try:
                order = self._orders.get(timeout=PING_SECONDS)
            except queue.Empty:
                order = {"op": "ping"}
            if order is None:
                return
            process = self._process
            if order["op"] == "ping" and self._waiting:
                self._unanswered += 1
                if self._started and self._unanswered > self._pings_unanswered_at_most:
                    self._give_up_relay()
                    continue
            if process is not None:
                # Where the connection is gone the reader sees it too, reconnects, and repeats the
                # order that stands.
                with contextlib.suppress(ConnectError):
                    process.write(protocol.encode_command(order))

    @property
    def _pings_unanswered_at_most(self) -> int:
        if self._relay is None:
            return UNANSWERED_FIRST
        return UNANSWERED_STOP if self._told_to_stop else UNANSWERED

    def _give_up_relay(self) -> None:
        """End the connection to a relay that does not answer; the reader starts another relay."""
        with self._lock:
            connection = self._connection
        if connection is not None and self._waiting:
            self._gave_up_relay = True
            connection.close()

    def _hear(self, process: RemoteProcess) -> bytes:
        """The next bytes of the relay's output; empty at its end. Raises ConnectError."""
        self._unanswered, self._waiting = 0, True
        try:
            data = process.read()
        except ConnectError:
            if not self._gave_up_relay:
                raise
        finally:
            self._waiting = False
        if self._gave_up_relay:
            self._gave_up_relay = False
            reason = "the relay does not answer; it may be stopped (SIGSTOP), or the network cut"
            if not self._closed:
                self._run.notice(f"{self.host}: {reason}; starting another one")
            raise ConnectError(self.host, "following the job", reason)
        if data:
            self._outage.answered(time.monotonic())
        return data

    def _read(self) -> None:
        try:
            process = self._reopen() if self._attached else self._launch()
        except NodeError as error:
            self._cannot(error)
            if self._run.inspection is not None:
                self._run.inspection.leave_out(self.host)
            return
        while process is not None and not self._follow(process):
            process = self._reopen()

    # Starting ----------------------------------------------------------------------------------

    def _launch(self) -> RemoteProcess | None:
        """The agent, with its request sent; None when the launch was called off meanwhile."""
        run, part = self._run, self._part
        self._state("connecting")
        connection = self._connect()
        if connection is None:
            return None
        if run.inspection is not None:
            self._state("checking")
            if not run.inspection.arrive(self.host, connection):
                wrong = [one.seen for one in run.inspection.errors if self.host in one.hosts]
                if wrong:
                    self._state("failed", wrong[0])
                self._over(machine.HostRefused(self.host))
                return None
        workdir = self._workdir()
        if run.tree is not None:
            self._state("syncing")
            result = send(
                connection,
                part.host,
                run.tree,
                workdir,
                python=self._python,
                trust_group=run.plan.trust_group,
            )
            for notice in result.notices:
                run.notice(f"{self.host}: {notice}")
            workdir = result.tree_path
            self.synced = result
        with self._lock:
            if self._called_off:
                return None
            self._stage = Stage.BEGUN
        self._state("preparing")
        process = self._start_agent(connection, self._request(workdir))
        self._writer.start()
        return process

    def _connect(self) -> Connection | None:
        """A new connection in place of the last one; None when the launch was called off."""
        connection = self._run.transport.connect(self._part.host)
        with self._lock:
            called_off = self._closed or (self._called_off and self._stage is Stage.CONNECTING)
            last = self._connection
            self._connection = None if called_off else connection
        if last is not None:
            last.close()
        if called_off:
            connection.close()
            return None
        return connection

    def _start_agent(self, connection: Connection, command: dict[str, Any]) -> RemoteProcess:
        """An agent with its first command. Only then may the writer have it: what this relay is
        for has to be said before anything else."""
        process = agent.start(connection, self._python, self._run.name, command)
        self._process = process
        return process

    @property
    def _python(self) -> str:
        return self._run.plan.agent_python(self._part)

    def _request(self, workdir: str) -> dict[str, Any]:
        run, part = self._run, self._part
        job = run.plan.job
        return {
            "op": "launch",
            "protocol": protocol.VERSION,
            "run": run.name,
            "host": self.host,
            "run_dir": run.plan.run_dir,
            "trust_group": run.plan.trust_group,
            "workdir": workdir,
            "script": job.script,
            "python": part.python,
            "setup": list(job.setup),
            "environment": self._environment(),
            "secrets": dict(run.secrets),
            "runtime": runtime_archive(),
            "world_size": run.plan.world_size,
            "processes": [
                {
                    "role": process.role,
                    "index": process.index,
                    "rank": process.rank,
                    "ranks": process.ranks,
                    "argv": list(process.argv),
                    "environment": dict(process.environment),
                    "service": process.service,
                }
                for process in part.processes
            ],
            "ports": list(part.ports),
            "route_to": part.route_to,
            "flight_recorder": job.framework == "torch" and job.watchdog.silence is not None,
            "grace": job.grace,
            "on_disconnect": job.on_disconnect,
            "lease": job.lease,
        }

    def _environment(self) -> dict[str, str]:
        own = {"DTRAIN_ATTEMPT": str(self._run.attempt)}
        if self._run.plan.job.watchdog.silence is not None:
            own["PYTHONFAULTHANDLER"] = "1"
        return {**own, **self._part.environment, "DTRAIN_ATTEMPT": own["DTRAIN_ATTEMPT"]}

    def _workdir(self) -> str:
        workdir = self._part.workdir
        if self._part.host.transport == "local" and not workdir.startswith("~"):
            return str(self._run.base / workdir)
        return workdir

    # Following ---------------------------------------------------------------------------------

    def _follow(self, process: RemoteProcess) -> bool:
        """Take in what the relay sends. True when there is nothing more to come from this host,
        False when the connection broke and the run goes on."""
        decoder = protocol.FrameDecoder()
        self._relay = None
        last: messages.Message | None = None
        # A relay numbers its streams from 1 on.
        self._streams.clear()
        self._sequence.begin_relay()
        try:
            while data := self._hear(process):
                for frame in decoder.feed(data):
                    if isinstance(frame, protocol.Data):
                        self._keep(frame)
                    else:
                        last = messages.read_message(frame.body)
                        self._take(last)
        except ConnectError as error:
            return self._broken(error)
        except ProtocolError as error:
            self._distrust(error)
            return True
        if isinstance(last, messages.Bye) or (self._called_off and not self._started):
            self._said_goodbye()
            return True
        if self._told_all:
            return True
        return self._broken(self._agent_failed("it ended", process, decoder))

    def _said_goodbye(self) -> None:
        owes_end = self._started and not self._sequence.ended
        if owes_end and not (self._told_to_stop or self._told_all or self._lingering):
            self._distrust(ProtocolError("bye: the job has not ended there"))
        else:
            self._over(machine.HostEnded(self.host))

    def _distrust(self, wrong: ProtocolError) -> None:
        """Stop using a host that is broken or hostile. A new connection would not help."""
        attempted = "following the job" if self._started else "preparing the job"
        error = AnswerError(self.host, attempted, wrong)
        self._orders.put({"op": "kill"})
        if self._stage is Stage.OVER and not self._lingering:
            self._run.post(Post(None, error))
            return
        if self._started:
            self._state("failed", error.reason)
        self._cannot(error)

    def _broken(self, error: NodeError) -> bool:
        """Whether the end of the connection is all that there is to hear from this host."""
        if self._started and not self._told_all and not self._closed:
            self._state("unreachable", error.reason)
            return False
        self._cannot(error)
        return True

    def _reopen(self) -> RemoteProcess | None:
        """A new relay on the running job; None when the host is given up."""
        self._outage.begin(time.monotonic())
        problem: NodeError | None = None
        first = self._attached
        self._attached = False
        while not self._closed and self._outage.lasts(time.monotonic()) < self._patience:
            if not first:
                # Jitter, so that a switch that comes back is not met by every host at once.
                delay = self._outage.next_delay()
                self._pause.wait(delay * random.uniform(0.5, 1.0))  # noqa: S311
            try:
                connection = self._connect()
                if connection is None:
                    return None
                process = self._start_agent(connection, self._attachment())
            except NodeError as error:
                problem = error
                if first:
                    self._state("unreachable", error.reason)
                first = False
                continue
            if self._standing is not None:
                self._orders.put(self._standing)
            return process
        problem = problem or self._silent()
        if self._stage is Stage.OVER:
            # It had ended, but not everything that it had written has come.
            self._run.post(Post(None, problem))
        else:
            self._over(machine.HostLost(self.host), problem)
        return None

    def _silent(self) -> NodeError:
        return ConnectError(
            self.host,
            "following the job",
            f"cut off for {self._patience:g} s",
            hint=_left_alone(self._run.plan.job),
        )

    @property
    def _patience(self) -> float:
        """Seconds for which a host may be out of reach."""
        if self._lingering:
            return math.inf
        return self._run.plan.job.restart.node_timeout

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

    def _attachment(self) -> dict[str, Any]:
        run = self._run
        return {
            "op": "attach",
            "protocol": protocol.VERSION,
            "run": run.name,
            "host": self.host,
            "run_dir": run.plan.run_dir,
            "trust_group": run.plan.trust_group,
            "offsets": self._offsets,
            "outputs": not self._lingering,
            "previous": self._relay,
        }

    # What a relay sends ------------------------------------------------------------------------

    def _keep(self, frame: protocol.Data) -> None:
        if self._full:
            return
        if frame.stream not in self._streams:
            raise ProtocolError(f"data of an unknown stream ({frame.stream})")
        writer, stream = self._streams[frame.stream]
        before = writer.size
        try:
            size = writer.append(frame.offset, frame.payload)
        except StorageError as error:
            self._cannot_store(error)
            return
        self._offsets[stream.path.name] = size
        if size == before:
            return
        self._outage.progressed()
        self.heard = time.monotonic()
        self._run.observer.output(stream, size)

    def _cannot_store(self, error: StorageError) -> None:
        # The job has to be stopped, and for that the host's events are still wanted.
        self._full = True
        self._run.post(Post(machine.LauncherFailed(), error))

    def _take(self, message: messages.Message) -> None:
        """Raises ProtocolError for what does not agree with the plan or with earlier messages."""
        run = self._run
        self._sequence.check_message(message, started=self._started)
        match message:
            case messages.Hello():
                self._compare_clocks(message.time)
                self._relay = message.pid
                hello = dataclasses.asdict(message)
                run.journal.write(time.time(), journal.Hello(self.host, hello))
            case messages.Prepared():
                self._state("ready")
                run.post(Post(machine.HostReady(self.host)))
            case messages.Attached():
                self._outage.attached(time.monotonic())
                self._state("stopping" if self._told_to_stop else "running")
            case messages.Refused(what) if self._lingering and what != "gone":
                pass  # it has no answer yet, and is asked again
            case messages.Refused(what):
                self._told_all = True
                self.gone = self.clean = what == "gone"
                self._cannot(self._refusal(message))
            case messages.StreamFound():
                self._add_stream(message)
            case messages.Happened(offset, event):
                self._take_event(offset, event, message)
            case messages.ProgressSaid():
                self._take_progress(message)
            case messages.Alive(supervisor, silent):
                self._check_supervisor(supervisor or 0, silent)
            case messages.Notice(text):
                self._pass_on(text)
            case messages.Lost():
                self._told_all = True
                self._over(machine.HostLost(self.host), self._died(message))
            case messages.RunSeen():
                raise ProtocolError("status: not requested")

    def _add_stream(self, found: messages.StreamFound) -> None:
        if self._lingering or found.id in self._streams:
            raise ProtocolError(f"stream: {found.id} was not asked for, or announced before")
        self._sequence.check_stream(found)
        stream = self._run.folder.stream(
            self.host, found.name, role=found.role, index=found.index, rank=found.rank
        )
        try:
            self._streams[found.id] = LogWriter(stream), stream
        except StorageError as error:
            self._cannot_store(error)

    def _take_event(self, offset: int, event: messages.Event, happened: messages.Happened) -> None:
        if self._lingering:
            # Only whether it is over matters.
            self.clean = isinstance(event, messages.Ended) and not event.survivors
            return
        if not self._sequence.is_new(happened):
            return
        self._offsets["events"] = offset
        self._outage.progressed()
        if offset > self._journaled:
            said = journal.HostEvent(self.host, offset, event.as_json())
            self._run.journal.write(time.time(), said)
        self._happened(event)

    def _take_progress(self, message: messages.ProgressSaid) -> None:
        if len(self._offsets) < MAX_OFFSETS or message.name in self._offsets:
            self._offsets[message.name] = message.offset
        # The worker wrote this, so an error in it is not the relay's.
        with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError, AttributeError):
            self._said(message.name.removesuffix(".progress"), message.said)

    def _pass_on(self, notice: str) -> None:
        """Show what the host wants a person to know, within limits: a worker can cause notices."""
        self._notices += 1
        if self._notices <= MAX_NOTICES:
            self._run.notice(f"{self.host}: {notice[:MAX_NOTICE]}")
        elif self._notices == MAX_NOTICES + 1:
            self._run.notice(f"{self.host}: further notices of this host are not shown")

    def _check_supervisor(self, pid: int, silent: float) -> None:
        """Report that a supervisor does not answer, or that it answers again."""
        if not self._started or self.over:
            return
        name = f"the supervisor (process {pid}) on {self.host}"
        if silent < SUPERVISOR_SILENCE:
            if self._silent_supervisor:
                self._run.notice(f"{name} answers again")
            self._silent_supervisor = False
            return
        hint = f"continue it there: kill -CONT {pid}"
        if not self._silent_supervisor:
            self._silent_supervisor = True
            self._run.notice(f"{name} does not answer; it may be stopped (SIGSTOP)\nhint: {hint}")
        if silent > self._patience:
            reason = f"its supervisor (process {pid}) has not answered for {silent:.0f} s"
            error = ConnectError(self.host, "following the job", reason, hint=hint)
            self.kill()
            self._over(machine.HostLost(self.host), error)

    def _said(self, process: str, said: dict[str, Any]) -> None:
        """What a worker has told through `dtrain.runtime`."""
        run = self._run
        self.heard = time.monotonic()
        match said.get("event"):
            case "progress":
                self._progressed(process, said)
            case "tensorboard" if run.tensorboard and self._tensorboard is None:
                self._show_tensorboard(int(said["port"]))

    def _progressed(self, process: str, said: dict[str, Any]) -> None:
        run = self._run
        report = Progress.read(process, said)
        self.step = report.step
        run.observer.progress(self.host, report)
        due = self.heard >= self._journal_at or report.step == report.total
        if due and process == speaker(run.plan):
            self._journal_at = self.heard + BETWEEN_REPORTS
            run.journal.write(time.time(), journal.Progressed(report))

    def _show_tensorboard(self, port: int) -> None:
        if not 1024 <= port <= 65535:
            return
        if self._part.host.transport != "local":
            try:
                self._tensorboard = Forward(port, lambda: self._connection)
            except OSError as error:
                self._run.notice(f"cannot show {self.host}'s TensorBoard here: {error}")
                return
            port = self._tensorboard.port
        text = f"TensorBoard of {self.host}: http://127.0.0.1:{port}/"
        self._run.observer.notice(text)
        self._run.journal.write(time.time(), journal.TensorBoard(self.host, text))

    def _refusal(self, refused: messages.Refused) -> PrepareError:
        kind = PortBusyError if refused.what == "port" else PrepareError
        doing = "taking up the job" if self.gone else "preparing the job"
        return kind(self.host, doing, refused.reason, hint=refused.hint)

    def _died(self, lost: messages.Lost) -> PrepareError:
        if lost.survivors:
            return self._undying(lost.survivors)
        self.clean = True
        return PrepareError(
            self.host,
            "running the job",
            lost.reason,
            hint=lost.hint or "something on that host ended it; what it had started was ended too",
        )

    def _undying(self, survivors: Iterable[messages.Survivor]) -> PrepareError:
        names = ", ".join(f"{each.name} (pid {each.pid})" for each in survivors)
        return PrepareError(
            self.host,
            "ending the job's processes",
            f"they do not die: {names}",
            hint="a process in uninterruptible sleep ends when its driver or disk answers",
        )

    def _happened(self, event: messages.Event) -> None:
        self._compare_clocks(event.time)
        match event:
            case messages.Exited():
                self._exited(event)
            case messages.Stack(role=role, index=index, rank=rank, text=text):
                self.stacks[str(rank) if rank is not None else f"{role}{index}"] = text
            case messages.Told():
                self.told = True
            case messages.Collectives(rank=rank, groups=groups):
                self.collectives[rank] = collectives.read(groups)
            case messages.Kernel(lines=lines, gpus=gpus):
                ours = [(then + self._clock_offset, line) for then, line in lines]
                found = understand(ours, gpus, self._part.host.gpus)
                self.kernel = [*self.kernel, *found][-MAX_KERNEL_MESSAGES:]
            case messages.Ended(survivors=survivors, error=error):
                self._over(machine.HostEnded(self.host), self._bad_end(survivors, error))
            case messages.Stopping(reason=reason) if not self._told_to_stop:
                self._run.post(Post(None, PrepareError(self.host, "running the job", reason)))

    def _bad_end(
        self, survivors: tuple[messages.Survivor, ...], error: str | None
    ) -> PrepareError | None:
        if survivors:
            return self._undying(survivors)
        if error:
            reason = f"the supervisor on the host failed: {error}"
            return PrepareError(self.host, "running the job", reason)
        return None

    def _compare_clocks(self, then: float) -> None:
        """Learn how far the host's clock is behind ours, from something it has just said.

        Each message gives that plus the time it took to come, so the least is the best.
        """
        self._clock_offset = min(self._clock_offset, time.time() - then)

    def _exited(self, event: messages.Exited) -> None:
        # One that was told to end has not done its work, even if it says so with status 0.
        failed = event.code != 0
        failures = self._failures(event) if failed and not event.stopping else ()
        worker = machine.WorkerId(self.host, event.role, event.index)
        self._run.post(
            Post(machine.WorkerExited(worker, failed or event.stopping), failures=failures)
        )

    def _failures(self, event: messages.Exited) -> tuple[Failure, ...]:
        """What an ``exited`` event says of the process, or of the ranks that torchrun ran."""
        if event.ranks:
            return tuple(
                Failure(
                    host=self.host,
                    role="worker",
                    index=rank.rank,
                    rank=rank.rank,
                    time=(rank.time or event.time) + self._clock_offset,
                    code=rank.exitcode,
                    signal=rank.signal,
                    message=rank.message,
                    traceback=rank.traceback,
                    pid=rank.pid,
                    out_of_memory=event.out_of_memory,
                )
                for rank in event.ranks
            )
        error = event.error or messages.ErrorReport()
        return (
            Failure(
                host=self.host,
                role=event.role,
                index=event.index,
                rank=event.rank,
                # Not the error file's own time, which torch gives in whole seconds.
                time=event.time + self._clock_offset,
                code=event.code,
                signal=event.signal,
                message=error.message,
                traceback=error.traceback,
                pid=event.pid,
                out_of_memory=event.out_of_memory,
            ),
        )

    # What the controller is told ---------------------------------------------------------------

    def _cannot(self, error: NodeError) -> None:
        """The host cannot do its part. Before the start that leaves nothing there; after it,
        nobody knows."""
        if self._started or self._stage is Stage.OVER:
            gone = self.gone and not self._lingering
            self._over((machine.HostEnded if gone else machine.HostLost)(self.host), error)
            return
        if not (isinstance(error, PortBusyError) and self._run.movable_port):
            self._state("failed", error.reason)
        self._over(machine.HostRefused(self.host), error)

    def _over(self, event: machine.Event, problem: DtrainError | None = None) -> None:
        """Tell how the host ended, once."""
        with self._lock:
            # A link that only lingers and is let go of has heard of no end.
            if self._stage is Stage.OVER or (self._lingering and self._closed):
                return
            self._stage = Stage.OVER
        if isinstance(event, machine.HostEnded):
            self._state("ended")
        self._run.post(Post(event, problem))

    @property
    def _told_to_stop(self) -> bool:
        return self._standing is not None and self._standing["op"] != "start"

    def _order(self, order: dict[str, Any]) -> None:
        self._standing = order
        self._orders.put(order)

    def settle(self, *, lost: bool) -> None:
        """Report the host's final state, where the last one that was reported is not final."""
        if not lost and self._reported not in ("ended", "failed"):
            self._state("ended")
        elif lost and self._reported not in ("lost", "unreachable", "failed"):
            self._state("lost", "did not say that the job's processes are gone")

    def _state(self, state: str, detail: str = "") -> None:
        self._reported = state
        self._run.observer.host_state(self.host, state, detail)
        self._run.journal.write(time.time(), journal.HostState(self.host, state, detail))


def close(links: Iterable[Link]) -> None:
    """Let go of hosts, whatever they are doing, once the orders given are on their way."""
    open_ = list(links)
    for link in open_:
        link.let_go()
    until = time.monotonic() + LAST_ORDERS
    for link in open_:
        link.close(max(0.0, until - time.monotonic()))


def _left_alone(job: Job) -> str:
    """What becomes of a job on a host that no launcher reaches."""
    if job.on_disconnect == "keep":
        return (
            "its part of the job may still run; `dtrain attach` takes it up, `dtrain stop` ends it"
        )
    return f"its part of the job ends by itself after {job.lease:g} s without a launcher"
