"""The process on the SSH channel, and the guard that stands in until everything is ready."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time

from dtrain.node.agent.control import (
    CONTROL_FD,
    MAX_RECORD,
    REQUEST_FD,
    DamagedError,
    call_supervisor,
    find_supervisor,
    lives,
    machine_id,
    open_events,
    peer_of,
    record_in,
)
from dtrain.node.agent.events import EventReader, damage
from dtrain.node.agent.evidence import tail_of
from dtrain.node.agent.folder import (
    cannot_write,
    check_workdir,
    create,
    discard,
    expand,
    folder_of,
    make_folder,
    open_run,
    trust_of,
)
from dtrain.node.agent.processes import look, name_list, read_file, reap, send, signal_name
from dtrain.node.agent.progress import ProgressFiles
from dtrain.node.agent.pulse import Pulse
from dtrain.node.agent.spawn import spawn, why_not_executed
from dtrain.node.agent.sweep import Sweep, Tag, adopt_orphans, load_prctl
from dtrain.node.agent.wire import (
    CHUNK,
    DATA,
    HEADER,
    MESSAGE,
    PREAMBLE,
    VERSION,
    RefusedError,
    encode,
    raw,
    shown,
    write_all,
)
from dtrain.node.agent.worker_files import decode, open_regular
from dtrain.node.boot import ISOLATED, boot_text, framed, pack

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, BinaryIO, Iterator

    from dtrain.node.agent.wire import Json
    from dtrain.node.importer import Importer

SUPERVISOR = "dtrain.node.agent.supervisor"
QUICK, SLOW = 0.005, 0.1
"""Seconds between two looks at files that grow, and at files that do not."""
ALONE = 60
"""Seconds without a word from the launcher, which pings every 5, after which a relay ends: nobody
will ever read what it may be waiting to write."""
ENDED_WELL = "status 0"
UNSEEN = "its end was not seen"
RESTARTED = "the machine was restarted, or this is another machine"
FAREWELL = 2.0
"""Seconds for a supervisor to exit after its `ended` event."""
MAX_UNHEARD = 1 << 20
"""Bytes of one message of the supervisor."""


class Stream:
    """One output file, followed."""

    def __init__(self, number: int, path: bytes, offset: int, fd: int = -1) -> None:
        """``fd``: the file, if it is open already."""
        self.number = number
        self.offset = offset
        self._path = path
        self._fd = fd

    def read(self) -> bytes:
        """What comes next; empty if there is nothing new."""
        try:
            if self._fd < 0:
                self._fd = open_regular(self._path)
            return os.pread(self._fd, CHUNK, self.offset)
        except OSError:
            return b""


class Relay:
    """The process on the channel."""

    def __init__(self, stdin: BinaryIO, importer: Importer) -> None:
        self._stdin = stdin
        self._importer = importer
        self._folder = b""
        self._tag: Tag | None = None
        self._supervisor: socket.socket | None = None
        self._waiting_for: Json | None = None  # record of a supervisor that takes no connection yet
        self._unsent: list[bytes] = []
        self._connecting = threading.Lock()
        self._child = 0  # the supervisor, as long as it is our child
        self._subreaper = False
        self._end = UNSEEN
        self._unheard = b""
        self._up = False
        self._aborted = False
        self._pulse = Pulse()
        self._events_file: bytes | int = b""
        self._events = EventReader(b"")
        self._events_from = 0
        self._progress_at = 0.0
        self._quiet = False  # only events are wanted
        self._offsets: dict[str, int] = {}
        self._progress = ProgressFiles(b"", {}, False)
        self._outputs: dict[bytes, int] = {}
        self._streams: list[Stream] = []
        self._ended = False

    def run(self) -> None:
        write_all(1, PREAMBLE)
        self._tell(
            "hello",
            protocol=VERSION,
            python="%d.%d.%d" % sys.version_info[:3],
            hostname=socket.gethostname(),
            time=time.time(),
            pid=os.getpid(),
        )
        line = self._stdin.readline()
        if not line:
            return
        try:
            command = json.loads(line)
            if command.get("protocol") != VERSION:
                raise RefusedError(
                    "agent",
                    "the launcher speaks protocol %s, not %d" % (command.get("protocol"), VERSION),
                )
            if not os.path.exists("/proc/self/stat"):
                raise RefusedError(
                    "agent",
                    "this host runs %s, and has no /proc" % sys.platform,
                    "dtrain runs jobs on Linux hosts alone",
                )
            self._folder = folder_of(command)
            self._tag = Tag(command["run"], command["host"], self._folder)
            self._trust = trust_of(command)
            self._events_file = os.path.join(self._folder, b"events")
            self._progress = ProgressFiles(self._folder, {}, False)
            if command.get("op") == "attach":
                self._attach(command)
            elif command.get("op") == "look":
                self._look()
            else:
                self._launch(command)
        except RefusedError as refusal:
            self._send(refusal.message)

    # Launching

    def _launch(self, command: Json) -> None:
        workdir = expand(command["workdir"])
        if not os.path.isdir(workdir):
            there = os.path.exists(workdir)
            raise RefusedError(
                "workdir",
                "workdir %s %s" % (shown(workdir), "is not a folder" if there else "not found"),
                "create it on this host, or let `job.sync` send your files there",
            )
        if not os.access(workdir, os.X_OK):
            raise RefusedError(
                "workdir",
                "workdir %s may not be entered: permission denied" % shown(workdir),
                "choose a `job.workdir` that you can use on this host",
            )
        # Setup may make the script.
        check_workdir(self._trust, workdir, command.get("script"), complete=False)
        guard, leash = self._start_guard(command, workdir)
        threading.Thread(target=self._listen, daemon=True).start()
        answer = self._await_prepared(command, leash)
        with contextlib.suppress(OSError):  # it has already undone the launch
            os.write(leash, b"k")
        os.close(leash)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(guard, 0)
        self._send(answer)
        if answer["type"] == "prepared":
            self._pulse.answered()  # until now it was busy
            self._open_events(self._child)
            self._open_outputs(command)
            self._follow()

    def _start_guard(self, command: Json, workdir: bytes) -> tuple[int, int]:
        """The guard's process id, and the leash that it hangs on."""
        prctl = load_prctl()
        self._subreaper = adopt_orphans(prctl)
        ours, theirs = socket.socketpair()
        held, leash = os.pipe()
        guard = os.fork()
        if guard == 0:
            try:
                os.setsid()
                for fd in map(int, os.listdir("/proc/self/fd")):
                    if fd not in (held, theirs.fileno()):
                        with contextlib.suppress(OSError):
                            os.close(fd)
                self._subreaper = adopt_orphans(prctl)
                answer = self._guard(command, workdir, held, theirs)
                if answer is not None:
                    theirs.sendall(encode(answer) + b"\n")
            finally:
                os._exit(0)
        os.close(held)
        theirs.close()
        self._supervisor = ours
        return guard, leash

    def _guard(
        self, command: Json, workdir: bytes, held: int, control: socket.socket
    ) -> Json | None:
        """Make the folder, run setup, and wait for the relay's word that all is well. Without it,
        or if the shell ends, undo the launch. What is to be said then.

        The relay may be killed at any moment, so it has no hand in anything that stays behind.
        """
        assert self._tag is not None
        try:
            folder, made = make_folder(self._trust, self._folder)
        except RefusedError as refusal:
            return refusal.message
        try:
            log = create(b"agent.log", folder, os.O_APPEND)
        except OSError as error:
            message = cannot_write(error, self._folder).message
            discard(self._folder, made)
            return message
        request = {
            **command,
            "absolute_workdir": workdir.decode("utf-8", "surrogateescape"),
            "folder": self._folder.decode("utf-8", "surrogateescape"),
            "made": [path.decode("utf-8", "surrogateescape") for path in made],
        }
        environment = {**os.environb, **self._tag.environment}
        environment[b"DTRAIN_SETUP"] = raw(setup_script(request))
        shell = next(
            (path for path in (b"/bin/bash", b"/usr/bin/bash") if os.access(path, os.X_OK)),
            b"/bin/sh",
        )
        reading, writing = os.pipe()
        self._child, failure = spawn(
            [shell, b"-c", b'eval "$DTRAIN_SETUP"'],
            environment,
            workdir,
            (log, log),
            {CONTROL_FD: control.fileno(), REQUEST_FD: reading},
        )
        for fd in (log, reading, folder):
            os.close(fd)
        program = pack(SUPERVISOR, self._importer.modules, self._importer.compiled())
        feed = framed(program) + encode(request)

        def hand_over() -> None:
            with contextlib.suppress(OSError):  # setup failed
                write_all(writing, feed)
            os.close(writing)

        threading.Thread(target=hand_over, daemon=True).start()
        while not select.select([held], [], [], 0.02)[0]:
            reap(self._child_ended)
            if self._child == 0:
                break
        else:
            if os.read(held, 1) == b"k":
                return None
        output = tail_of(os.path.join(self._folder, b"agent.log"), 12)
        Sweep(self._tag, 0.0, self._child_ended, self._subreaper).finish()
        discard(self._folder, made)
        body = {"type": "undone", "fate": self._end, "log": output}
        if failure is not None:
            body["failure"] = why_not_executed(failure, shell, environment)
        return body

    def _child_ended(self, pid: int, status: int) -> None:
        if pid == self._child:
            self._child = 0
            if os.WIFSIGNALED(status):
                self._end = "killed by " + signal_name(os.WTERMSIG(status))
            else:
                self._end = "status %d" % os.WEXITSTATUS(status)

    def _await_prepared(self, command: Json, leash: int) -> Json:
        """The supervisor's answer, or ours if the launch ends before there is a supervisor."""
        # What there is to undo the guard alone knows: the folder and its processes may be those of
        # a run that was launched before.
        line, status, undoing = 0, None, False
        while True:
            if self._aborted and not undoing:
                undoing = True
                try:
                    os.write(leash, b"u")
                except OSError:
                    self._forward(b'{"op":"abort"}\n')
            messages = self._hear(0.05)
            if messages is None:
                # Everybody has been killed, the guard too.
                messages = [{"type": "undone", "fate": self._end, "log": ""}]
            for message in messages:
                if message["type"] == "setup":
                    line, status = message["line"], message.get("status")
                elif message["type"] == "up":
                    self._up, self._child = True, message["pid"]
                    self._pulse.watch(self._child)
                elif undoing:
                    if message["type"] != "prepared":
                        return {"type": "bye"}
                elif message["type"] == "undone":
                    return self._why_undone(message, command["setup"], line, status)
                else:
                    return message

    def _why_undone(self, message: Json, setup: list[str], line: int, status: int | None) -> Json:
        """``line`` is that of the setup line that was run last, ``status`` its own if it failed."""
        log = message["log"]
        if "failure" in message:
            return RefusedError("setup", message["failure"]).message
        if self._up or not 0 < line <= len(setup):
            where = " after `job.setup`" if setup else ""
            reason = "the supervisor could not start%s (%s)" % (where, message["fate"])
            return RefusedError("agent", reason, log).message
        how = "failed with status %d" % status if status is not None else "ended the shell"
        reason = "setup line %d (%s) %s" % (line, setup[line - 1], how)
        return RefusedError("setup", reason, log or "it printed nothing").message

    def _hear(self, timeout: float) -> list[Json] | None:
        """What the supervisor says within ``timeout`` seconds; None once it has hung up."""
        if self._supervisor is None:
            return None if self._waiting_for is None else []
        if not select.select([self._supervisor], [], [], timeout)[0]:
            return []
        try:
            data = self._supervisor.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            return None
        *lines, self._unheard = (self._unheard + data).split(b"\n")
        self._unheard = self._unheard[:MAX_UNHEARD]
        messages = [message for message in map(decode, lines) if message and "type" in message]
        if any(message["type"] == "pong" for message in messages):
            self._pulse.answered()
        return [message for message in messages if message["type"] != "pong"]

    def _fate(self) -> str:
        """How the supervisor has ended, if it is our child."""
        for _ in range(100):
            if reap(self._child_ended) or self._child == 0:
                break
            time.sleep(0.01)
        return self._end

    # Attaching

    def _attach(self, command: Json) -> None:
        try:
            record, sock = self._find_supervisor()
        except FileNotFoundError:
            raise RefusedError(
                "gone",
                "no run %s on this host (%s does not exist)"
                % (command["run"], shown(self._folder)),
            ) from None
        self._end_previous(command)
        self._quiet = not command.get("outputs", True)
        self._offsets = dict(command.get("offsets") or {})
        self._events_from = self._offsets.get("events", 0)
        self._progress = ProgressFiles(self._folder, self._offsets, True)
        self._up = True
        pid = peer_of(sock)[0] if sock is not None else 0
        if not self._open_events(pid) and record is None:
            raise RefusedError(
                "agent",
                "run %s is not prepared yet, or a process of the job has removed %s/supervisor"
                % (command["run"], shown(self._folder)),
            )
        if sock is None and record is not None and not self._has_ended():
            if record["machine"] != machine_id():
                self._end = RESTARTED
            elif lives(record):
                self._waiting_for, pid = record, record["pid"]
        if pid:  # otherwise the process id may be another process's by now
            self._pulse.watch(pid)
        self._supervisor = sock
        self._tell("attached", folder=shown(self._folder), running=pid != 0)
        threading.Thread(target=self._listen, daemon=True).start()
        self._follow()

    def _connect(self, record: Json, pause: float) -> None:
        """Try again to connect to a supervisor that lives. One that is stopped takes no connection
        once its queue is full, but it may be continued."""
        sock = call_supervisor(record)
        with self._connecting:
            if sock is not None:
                for line in self._unsent:
                    sock.sendall(line)
                self._supervisor = sock
            if sock is not None or not lives(record):
                self._waiting_for = None
                return
        time.sleep(pause)

    def _end_previous(self, command: Json) -> None:
        """Kill the relay that this one replaces, if the launcher names one: it does not answer."""
        pid = command.get("previous")
        proc = look(pid) if pid else None
        words = (read_file("/proc/%d/cmdline" % pid) or b"").split(b"\0") if pid else []
        if proc is not None and words[-3:] == [b"dtrain-agent", raw(command["run"]), b""]:
            send(proc, signal.SIGKILL)

    def _all_events(self) -> Iterator[Json]:
        return EventReader(self._events_file).all()

    def _open_events(self, supervisor: int) -> bool:
        """Read events from the open file from now on. ``supervisor`` is the process that has it
        open, or 0."""
        with contextlib.suppress(OSError):
            self._events_file = open_events(supervisor, self._folder)
        self._events = EventReader(self._events_file)
        return isinstance(self._events_file, int)

    def _open_outputs(self, command: Json) -> None:
        """Open the output files before there are workers that could remove them."""
        for process in command["processes"]:
            name = "%s-%d" % (process["role"], process["index"])
            for suffix in (".out", ".err"):
                path = os.path.join(self._folder, raw(name + suffix))
                with contextlib.suppress(OSError):
                    self._outputs[path] = open_regular(path)

    def _find_supervisor(self) -> tuple[Json | None, socket.socket | None]:
        """The supervisor's record, and a connection to it if it answers. Neither is there before
        the run is prepared. Raises as `_record` does."""
        problem: Exception | None = None
        try:
            record = self._record()
        except (FileNotFoundError, DamagedError) as error:
            record, problem = None, error
        sock = call_supervisor(record) if record is not None else None
        sock = sock or find_supervisor(self._folder)
        if sock is None and problem is not None:
            raise problem
        return record, sock

    def _record(self) -> Json | None:
        """What the supervisor left in the run's folder; None before it is prepared.

        Raises FileNotFoundError without the folder, RefusedError if it is unsafe, and DamagedError.
        """
        try:
            folder = open_run(self._trust, self._folder)
        except (FileNotFoundError, NotADirectoryError):
            raise FileNotFoundError from None
        except OSError as error:
            raise cannot_write(error, self._folder) from None
        try:
            fd = self._trust.open_file(b"supervisor", os.O_RDONLY, folder, self._folder)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DamagedError(cannot_write(error, self._folder).message["reason"]) from None
        finally:
            os.close(folder)
        with os.fdopen(fd, "rb") as file:
            return record_in(file.read(MAX_RECORD), self._folder)

    def _has_ended(self) -> bool:
        return any(event["event"] == "ended" for event in self._all_events())

    # Looking

    def _look(self) -> None:
        """Tell how the run stands here, and do nothing about it."""
        try:
            record, sock = self._find_supervisor()
        except FileNotFoundError:
            why = "%s does not exist" % shown(self._folder)
            self._tell("status", state="missing", since=None, why=why, processes=[])
            return
        self._open_events(peer_of(sock)[0] if sock is not None else 0)
        events: dict[str, list[Json]] = {"started": [], "exited": [], "ended": []}
        for event in self._all_events():
            events.get(event["event"], []).append(event)
        started = events["started"]
        exited = {(event["role"], event["index"]): event for event in events["exited"]}
        processes = []
        for event in started:
            end = exited.get((event["role"], event["index"]), {})
            names = {name: event[name] for name in ("role", "index", "rank", "pid")}
            fate = {"ended": end.get("time"), "code": end.get("code"), "signal": end.get("signal")}
            processes.append({**names, "started": event["time"], **fate})
        ended = [event["time"] for event in events["ended"]]
        if ended:
            state, since, why = "ended", ended[0], ""
        else:
            state, why = self._standing(record, sock, bool(started))
            since = started[0]["time"] if started and state == "running" else None
        self._tell("status", state=state, since=since, why=why, processes=processes)

    def _standing(
        self, record: Json | None, sock: socket.socket | None, started: bool
    ) -> tuple[str, str]:
        """The state of a run that has reported no end, and why it is in that state."""
        if sock is not None:
            return "running" if started else "ready", ""
        if record is None:
            return "preparing", ""
        if record["machine"] != machine_id():
            return "gone", RESTARTED
        if lives(record):
            return "running", "its supervisor (process %d) does not answer" % record["pid"]
        return "gone", self._lost_because("something ended its supervisor")

    # Following

    def _follow(self) -> None:
        """Send what is new until the run is over and everything has been sent."""
        # Kills, if it comes to that: no signal handler runs while the connection takes no bytes.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(ALONE)
        pause = QUICK
        while True:
            if self._waiting_for is not None:
                self._connect(self._waiting_for, pause)
            heard = self._hear(pause)
            reap(self._child_ended)
            for message in heard or ():
                if message["type"] in ("refused", "bye"):  # it gave up before the start
                    self._send(message)
                    return
            gone = heard is None
            over = self._ended or gone
            self._answer_launcher()
            progress = self._relay_events()
            if gone and not self._ended:
                self._report_lost()
                over = True
            progress |= not self._quiet and self._relay_progress(over)
            for stream in self._streams:
                progress |= self._relay_stream(stream)
            if progress:
                pause = QUICK
            elif over:
                break
            else:
                pause = min(pause * 2, SLOW)
        # It has told of the end, and is about to go: whoever hears `bye` finds nothing any more.
        until = time.monotonic() + FAREWELL
        while not gone and time.monotonic() < until:
            gone = self._hear(QUICK) is None
        if self._child:
            self._fate()  # it hangs up a moment before it has gone
        self._tell("bye")

    def _answer_launcher(self) -> None:
        """Say that the relay is alive, and whether the supervisor is."""
        if self._pulse.pinged:
            self._pulse.pinged = False
            self._tell("alive", supervisor=self._pulse.pid, silent=self._pulse.silent)
        self._pulse.rouse()
        while self._pulse.notices:
            self._tell("notice", text=self._pulse.notices.pop(0))

    def _relay_events(self) -> bool:
        found = self._events.read()
        for event, end in found:
            if event["event"] == "started":
                name = "%s-%d" % (event["role"], event["index"])
                path = os.path.join(self._folder, raw(name))
                self._add(name, path + b".out", path + b".err", event["role"], event)
            elif event["event"] == "rank":
                with contextlib.suppress(UnicodeEncodeError):  # no supervisor's
                    place = os.path.join(self._folder, raw(event["logs"]))
                    paths = os.path.join(place, b"stdout.log"), os.path.join(place, b"stderr.log")
                    self._add("rank-%d" % event["rank"], *paths, "worker", event)
            elif event["event"] == "ended":
                self._ended = True
            if end > self._events_from:
                self._tell("event", offset=end, event=event)
        return bool(found)

    def _relay_progress(self, over: bool) -> bool:
        """What workers have said with `dtrain.runtime` since the last look."""
        now = time.monotonic()
        if now < self._progress_at and not over:
            return False
        self._progress_at = now + SLOW
        found = False
        for name, end, said in self._progress.read():
            found = True
            self._tell("progress", name=name, offset=end, said=said)
        for notice in self._progress.notices:
            self._tell("notice", text=notice)
        self._progress.notices.clear()
        return found

    def _add(self, name: str, out: bytes, err: bytes, role: str, event: Json) -> None:
        if self._quiet:
            return
        rank = event["rank"]
        index = rank if event["event"] == "rank" else event["index"]
        for fd, suffix, path in (("stdout", ".out", out), ("stderr", ".err", err)):
            full = name + suffix
            offset, opened = self._offsets.get(full, 0), self._outputs.pop(path, -1)
            stream = Stream(len(self._streams) + 1, path, offset, opened)
            self._streams.append(stream)
            self._tell(
                "stream", id=stream.number, name=full, role=role, index=index, rank=rank, fd=fd
            )

    def _relay_stream(self, stream: Stream) -> bool:
        data = stream.read()
        if data:
            self._write(HEADER.pack(DATA, stream.number, stream.offset, len(data)) + data)
            stream.offset += len(data)
        return bool(data)

    def _report_lost(self) -> None:
        """The supervisor is dead: do for it what it would have done."""
        assert self._tag is not None
        fate = self._fate()
        take = self._child_ended if self._subreaper else None
        survivors = Sweep(self._tag, 0.0, take, self._subreaper).finish()
        log = tail_of(os.path.join(self._folder, b"agent.log"), 5)
        died = "the supervisor died: %s%s" % (fate, "\n" + log if log else "")
        reason = self._lost_because(died)
        hint = "" if reason == died else "a job must not change the files in $DTRAIN_RUN_DIR"
        self._tell("lost", reason=reason, survivors=name_list(survivors), hint=hint)
        self._ended = True
        self._supervisor = None

    def _lost_because(self, died: str) -> str:
        """Why nobody knows how the run has ended; ``died`` unless the events file is to blame."""
        path = os.path.join(self._folder, b"events")
        wrong = damage(path) if self._end in (UNSEEN, ENDED_WELL) else ""
        if self._end == ENDED_WELL and not wrong:
            wrong = "does not say how"
        if not wrong:
            return died
        return "the supervisor has ended, but %s %s; a process of the job has changed that file" % (
            shown(path),
            wrong,
        )

    # Both ways

    def _listen(self) -> None:
        """Pass commands on, whatever the other thread waits for. Runs in a thread of its own."""
        for line in iter(self._stdin.readline, b""):
            if signal.alarm(0):
                signal.alarm(ALONE)
            if self._up:
                # Pings must not block: they fill the socket of a supervisor that is stopped.
                self._forward(line, socket.MSG_DONTWAIT if self._pulse.note(line) else 0)
                self._pulse.rouse()  # at once: this may be the last command before we are left
            elif b'"ping"' not in line:
                self._aborted = True
        # Nobody is there any more. What is not yet started the supervisor or the guard undoes.
        os._exit(0)

    def _forward(self, line: bytes, flags: int = 0) -> None:
        with self._connecting:
            supervisor = self._supervisor
            if self._waiting_for is not None and not flags:
                self._unsent.append(line)
        if supervisor is not None:
            with contextlib.suppress(OSError):
                supervisor.sendall(line, flags)

    def _tell(self, kind: str, **body: Any) -> None:
        self._send({"type": kind, **body})

    def _send(self, message: Json) -> None:
        data = encode(message)
        self._write(HEADER.pack(MESSAGE, 0, 0, len(data)) + data)

    def _write(self, data: bytes) -> None:
        try:
            write_all(1, data)
        except OSError:
            os._exit(0)  # the reader is gone; the job is not ours to end


def setup_script(request: Json) -> str:
    """A shell script that runs the setup lines and becomes the supervisor."""

    def quoted(word: str) -> str:
        return "'" + word.replace("'", "'\\''") + "'"

    def report(line: int, rest: str) -> str:
        return 'printf \'{"type":"setup","line":%d%s}\\n\'' % (line, rest)

    lines = ["unset DTRAIN_SETUP"]
    for number, line in enumerate(request["setup"], 1):
        lines.append("%s >&%d" % (report(number, ""), CONTROL_FD))
        failed = report(number, ',"status":%d') + " $? >&%d; exit 1" % CONTROL_FD
        hidden = "%d>&- %d>&-" % (CONTROL_FD, REQUEST_FD)
        lines.append("eval %s %s || { %s; }" % (quoted(line), hidden, failed))
    lines.append("%s >&%d" % (report(len(request["setup"]) + 1, ""), CONTROL_FD))
    stream = 'open(%d,"rb")' % REQUEST_FD
    command = [sys.executable, ISOLATED, "-c", boot_text(stream), "dtrain-supervisor"]
    command += [request["run"], request["host"]]
    lines.append("exec " + " ".join(map(quoted, command)))
    return "\n".join(lines)


def main(stream: BinaryIO, importer: Importer) -> None:
    """The relay: commands follow the program on ``stream``."""
    Relay(stream, importer).run()
    sys.stderr.flush()
    os._exit(0)  # daemon threads and all
