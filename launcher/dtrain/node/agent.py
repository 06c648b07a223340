"""The node agent: what dtrain runs on a host. One file, Python 3.8, standard library alone.

Theory of operation
===================

The launcher runs `python -c BOOT` on the host through SSH (or as a local process), sends this
file over stdin, and then commands as lines of JSON. Three kinds of process come out of it:

    launcher  <== stdin, stdout ==>  relay  <== unix socket ==>  supervisor  --->  workers
                                       |                             |                |
                                       +-------- reads --------- events file    .out .err files

*   The **relay** is the process on the SSH channel. It passes commands on, and follows files,
    sending what is new as frames. It owns nothing: it may be killed at any moment, and a slow
    reader slows only the relay.
*   The **supervisor** is detached (own session, no terminal, no pipe of the channel). It starts
    the workers, reaps them, stops them, and appends what happens to the events file. Anything a
    launcher can learn is in that file and the workers' output files, so a new relay can always
    pick up where another one ended: that is what `attach` does.
*   A **guard** stands between the two until everything is prepared. It makes the run's folder
    and starts the setup shell. Should the launch fail or be called off, or the relay die, it ends
    what setup has started and removes the folder.

The supervisor is started *through* the setup shell, as its last `exec`, so that whatever setup
changed (environment, limits, umask, cgroup, affinity) is inherited and not imitated.

Nothing of the job runs before `start`; a launch that is refused, aborted or forgotten before
that leaves neither process nor folder.

What belongs to a run
---------------------

Everything that the supervisor's children started. Three marks tell:

*   descent: the supervisor is a subreaper, so that orphans become its children;
*   the tag: DTRAIN_RUN_ID, DTRAIN_HOST and DTRAIN_RUN_DIR in /proc/PID/environ, all exact, and
    the same user. No two launches on a host ever had the same run folder;
*   and a *different* tag says the opposite. A run launched from inside a worker has its own
    supervisor and its own tag, and its whole subtree is left alone although it descends from us.

To end a run: TERM to all, grace, then KILL again and again until the kernel says that no child is
left, and two scans of /proc in a row find nothing else. What is still there after `PATIENCE`
seconds (stuck in the kernel) is reported by name. Signals go through pidfds, or where there are
none after the start time has been compared, so that a recycled process id is never hit.

What the launcher sends and what it is told is specified in `dtrain/protocol.py`.
"""

from __future__ import annotations

import binascii
import contextlib
import errno
import fcntl
import json
import marshal
import os
import re
import select
import signal
import socket
import struct
import sys
import threading
import time

TYPE_CHECKING = False  # importing typing would cost as much as importing json
if TYPE_CHECKING:
    from typing import Any, BinaryIO, Callable

    Json = dict[str, Any]

# Protocol. Held equal to dtrain/protocol.py by a test.

VERSION = 1
PREAMBLE = b"\x00dtrain-relay-1\n"
HEADER = struct.Struct(">BIQI")
MESSAGE, DATA = 1, 2

CHUNK = 512 << 10
"""Bytes of one stream sent before the next one has its turn."""
QUICK, SLOW = 0.005, 0.1
"""Seconds between two looks at files that grow, and at files that do not."""

RESERVED = 64 << 10
"""Bytes set aside for events, so that a full disk does not silence the supervisor."""
LEAST_FREE = 16 << 20
"""Bytes that must be free for a launch to begin."""
ALONE = 60
"""Seconds without a word from the launcher, which pings every 5, after which a relay ends: nobody
will ever read what it may be waiting to write."""
START_WITHIN = 60.0
"""Seconds, besides the lease, that a prepared job waits for `start`."""
PATIENCE = 10.0
"""Seconds of KILL before what is left counts as a survivor."""
MAX_ERROR_FILE = 1 << 20
MAX_TRACEBACK = 16 << 10
SPY_LIMIT = 10.0
"""Seconds for py-spy to look at all workers."""
TROUBLE = re.compile(
    rb"NVRM: Xid|[Kk]ill(?:ed)? process \d|I/O error|EXT4-fs error|XFS \(.*(?:orruption|hutting)"
)
"""Lines of the kernel's log that the launcher may want; `failures/kernel.yaml` knows them."""
MAX_RECORDS, MAX_LINES, MAX_LINE = 1 << 16, 50, 500
JOURNAL_LIMIT = 2.0
"""Seconds for journalctl to answer."""
DUMP_LIMIT = 20.0
"""Seconds in which torch should have written what its flight recorder holds: it looks once a second
whether it is asked, and takes long to tell its stacks on a busy machine."""
MAX_DUMP = 64 << 20
LATEST = 8
"""Collectives of each process group that are told."""
MAX_GROUPS, MAX_TENSORS, MAX_FRAMES = 64, 8, 40
ABORT_LIMIT = 5.0
"""Seconds in which Python should have written its stack after SIGABRT."""

RESTARTED = "the machine was restarted, or this is another machine"

CONTROL_FD, REQUEST_FD = 7, 8
"""Where the supervisor finds its relay, and its code and request; setup never sees them."""
STAGE = (
    "import os,marshal;boot=os.fdopen(8,'rb');code=marshal.loads(boot.read(int(boot.readline())));"
    "exec(code)"
)


class RefusedError(Exception):
    """The job cannot start on this host."""

    def __init__(self, what: str, reason: str, hint: str = "") -> None:
        super().__init__(reason)
        self.message = {"type": "refused", "what": what, "reason": reason, "hint": hint}


def raw(text: str) -> bytes:
    """The bytes that ``text`` stands for, whatever this host's locale."""
    return text.encode("utf-8", "surrogateescape")


def shown(data: bytes) -> str:
    """``data`` for a message to a person."""
    return data.decode("utf-8", "backslashreplace")


def encode(body: Json) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            select.select([], [fd], [])


# Processes on this host


class Proc:
    """One line of /proc/PID/stat. Process id and start time together name a process for good."""

    __slots__ = ("alive", "name", "pgrp", "pid", "ppid", "start", "state")

    def __init__(self, pid: int, stat: bytes) -> None:
        # The name stands in parentheses and may itself hold parentheses and spaces.
        head, _, tail = stat.rpartition(b")")
        fields = tail.split()
        self.pid = pid
        self.name = head.partition(b"(")[2]
        self.state = fields[0]
        self.ppid = int(fields[1])
        self.pgrp = int(fields[2])
        self.start = int(fields[19])
        # A zombie whose main thread alone has ended still runs the other threads.
        self.alive = self.state not in (b"Z", b"X") or int(fields[17]) > 1


def read_file(path: str | bytes, limit: int = 1 << 22) -> bytes | None:
    """Up to ``limit`` bytes of a file, or None if it cannot be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    parts = []
    try:
        while limit > 0:
            part = os.read(fd, min(limit, 1 << 16))
            if not part:
                break
            parts.append(part)
            limit -= len(part)
    except OSError:
        return None
    finally:
        os.close(fd)
    return b"".join(parts)


def look(pid: int) -> Proc | None:
    stat = read_file("/proc/%d/stat" % pid)
    return Proc(pid, stat) if stat else None


def processes() -> dict[int, Proc]:
    """All of this host. Those that live only for a moment are the newest: they come first."""
    pids = sorted((int(name) for name in os.listdir("/proc") if name.isdigit()), reverse=True)
    found = map(look, pids)
    return {proc.pid: proc for proc in found if proc is not None}


def own_children() -> list[int] | None:
    """Our children, also those that have ended; None if this kernel does not list them.

    While we wait for none of them, no process id in it can come to name another process.
    """
    found: list[int] = []
    for task in os.listdir("/proc/self/task"):
        data = read_file("/proc/self/task/%s/children" % task)
        if data is None:
            return None
        found += map(int, data.split())
    return found


def reap(take: Callable[[int, int], None]) -> bool:
    """Hand over process id and status of every child that has ended. True if none is left."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return True
        if pid == 0:
            return False
        take(pid, status)


def spy_command(pid: int) -> list[bytes]:
    """How to have a process's Python stack shown: by the py-spy of its own environment. Empty
    without one."""
    environment = environment_of(pid)
    try:
        python = os.readlink(b"/proc/%d/exe" % pid)
    except OSError:  # it has ended meanwhile
        return []
    # What it was called as: in a virtual environment, a link to the python that it was made from.
    called = (read_file("/proc/%d/cmdline" % pid) or b"").partition(b"\0")[0]
    paths = environment.get(b"PATH", b"").split(b":")
    places = [os.path.dirname(called), os.path.dirname(python), *paths]
    virtual = environment.get(b"VIRTUAL_ENV")
    if virtual:
        places.insert(0, virtual + b"/bin")
    for place in places:
        program = os.path.join(place, b"py-spy")
        if place and os.access(program, os.X_OK):
            return [program, b"dump", b"--full-filenames", b"--pid", b"%d" % pid]
    return []


def spy(pids: list[int]) -> dict[int, str]:
    """The Python stacks of those processes that py-spy is there for, and may look at."""
    import subprocess  # which takes long to import, and is needed once in a run's life at most

    spies = {}
    for pid in pids:
        command = spy_command(pid)
        with contextlib.suppress(OSError):
            if command:
                spies[pid] = subprocess.Popen(
                    command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
                )
    deadline = time.monotonic() + SPY_LIMIT
    found = {}
    for pid, process in spies.items():
        try:
            said = process.communicate(timeout=max(0.0, deadline - time.monotonic()))[0]
        except subprocess.TimeoutExpired:
            process.kill()
            said = process.communicate()[0]
        # Its status says nothing: the supervisor may have reaped it.
        if said:
            found[pid] = shown(said[:MAX_TRACEBACK])
    return found


def environment_of(pid: int, having: bytes = b"") -> dict[bytes, bytes]:
    """The environment that the process was started with; empty if it cannot be read, or has no
    variable ``having``."""
    data = read_file("/proc/%d/environ" % pid) or b""
    found: dict[bytes, bytes] = {}
    if having in data:
        for entry in data.split(b"\0"):
            name, equals, value = entry.partition(b"=")
            if equals:
                found.setdefault(name, value)
    return found


class Tag:
    """What every process of one run on one host has in its environment.

    The folder is what makes it unique: it was made for this launch and existed before no other.
    """

    def __init__(self, run: str, host: str, folder: bytes) -> None:
        self.environment = {
            b"DTRAIN_RUN_ID": raw(run),
            b"DTRAIN_HOST": raw(host),
            b"DTRAIN_RUN_DIR": folder,
        }

    def of(self, pid: int) -> bool | None:
        """True for this run's, False for another run's, None without a whole tag."""
        entries = environment_of(pid, having=b"DTRAIN_RUN_DIR=")
        found = {name: entries.get(name) for name in self.environment}
        if found == self.environment:
            return True
        folder = found[b"DTRAIN_RUN_DIR"]
        if None not in found.values() and folder != self.environment[b"DTRAIN_RUN_DIR"]:
            return False
        return None


def members(tag: Tag, root: int) -> list[Proc]:
    """The living processes of a run: below ``root`` (itself left out) if it is not 0, or tagged,
    or below those.

    Subtrees tagged as another run's are left out, wherever they are.
    """
    table = processes()
    children: dict[int, list[Proc]] = {}
    for proc in table.values():
        children.setdefault(proc.ppid, []).append(proc)
    me, uid = os.getpid(), os.geteuid()
    found: dict[int, Proc] = {}

    def descend(proc: Proc) -> None:
        pending = [proc]
        while pending:
            proc = pending.pop()
            if proc.pid in found or proc.pid in (me, root) or tag.of(proc.pid) is False:
                continue
            found[proc.pid] = proc
            pending += children.get(proc.pid, ())

    for child in children.get(root, ()) if root else ():
        descend(child)
    for proc in table.values():
        with contextlib.suppress(OSError):
            own = proc.alive and os.stat("/proc/%d" % proc.pid).st_uid == uid
            if own and proc.pid not in found and tag.of(proc.pid):
                descend(proc)
    return [proc for proc in found.values() if proc.alive]


def send(proc: Proc, signum: int) -> None:
    """Signal ``proc``, and never another process that has come to bear its number."""
    pidfd = -1
    if hasattr(os, "pidfd_open"):
        try:
            pidfd = os.pidfd_open(proc.pid)
        except OSError as error:
            if error.errno != errno.ENOSYS:
                return
    now = look(proc.pid)
    with contextlib.suppress(OSError):  # gone, or not ours to signal: the next scan tells
        if now is not None and now.start == proc.start:
            if pidfd >= 0:
                signal.pidfd_send_signal(pidfd, signum)
            else:
                os.kill(proc.pid, signum)
    if pidfd >= 0:
        os.close(pidfd)


def await_ends(procs: list[Proc], limit: float) -> None:
    """Wait until all of them have ended, or so many seconds."""
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        now = [(proc, look(proc.pid)) for proc in procs]
        if not any(one is not None and one.alive and one.start == proc.start for proc, one in now):
            break
        time.sleep(0.02)


class Sweep:
    """Ends the processes of a run, one step at a time.

    A scan of /proc can miss a process that forks and exits again and again. The kernel misses
    none: while anything lives below a subreaper, the subreaper has a child. So a subreaper is
    done when it has no child but those of other runs, and what hops from process to process it
    kills where each hop ends: among its own children. Scans serve to find what is far down, or
    was started by setup and is not below us; without a subreaper, many of them have to do.
    """

    def __init__(
        self,
        tag: Tag,
        grace: float,
        take: Callable[[int, int], None] | None,
        subreaper: bool = True,
        groups: frozenset[int] | set[int] = frozenset(),
    ) -> None:
        """``take`` is told of our children's ends; None if the run is not below us at all.
        ``groups`` are process groups known to hold nothing but this run's processes."""
        self._tag, self._take, self._groups = tag, take, set(groups)
        self._proof = subreaper and take is not None
        self.kill_at = time.monotonic() + grace
        self.survivors: list[Proc] = []
        self._told: set[tuple[int, int]] = set()
        self._last: set[int] = set()
        self._clean = 0

    def step(self) -> float | None:
        """Do what is due. Seconds until the next step, or None when it is over."""
        now = time.monotonic()
        if now >= self.kill_at:
            self._strike()
        childless = self._take is not None and reap(self._take)
        found = members(self._tag, os.getpid() if self._take is not None else 0)
        children = self._children()
        if not found and not children:
            self._clean += 1
            sure = self._proof and (childless or children is not None)
            return 0.01 if self._clean < (2 if sure else 20) else None
        self._clean = 0
        if now < self.kill_at:
            for proc in found:
                if (proc.pid, proc.start) not in self._told:
                    self._told.add((proc.pid, proc.start))
                    send(proc, signal.SIGTERM)
                    if proc.state == b"T":
                        send(proc, signal.SIGCONT)
            return min(0.1, self.kill_at - now)
        if now > self.kill_at + PATIENCE:
            seen = found or [proc for proc in map(look, children or ()) if proc is not None]
            self.survivors = [proc for proc in seen if proc.alive]
            if self.survivors:
                return None
        # A group is killed in one stroke, before any of its processes can fork again.
        self._groups.update(proc.pid for proc in found if proc.pid == proc.pgrp)
        for group in self._groups.intersection(proc.pgrp for proc in found):
            with contextlib.suppress(OSError):
                os.killpg(group, signal.SIGKILL)
        for proc in found:
            send(proc, signal.SIGKILL)
        pids = {proc.pid for proc in found}
        fresh, self._last = pids - self._last, pids
        return 0.0 if fresh else 0.02

    def _children(self) -> list[int] | None:
        """Our children that belong to the run, or None if that cannot be told."""
        found = own_children() if self._proof else None
        return found and [pid for pid in found if self._tag.of(pid) is not False]

    def _strike(self) -> None:
        """Kill our children, and those that become our children by that, as fast as can be."""
        before = None
        while self._take is not None:
            reap(self._take)
            children = self._children()
            if not children or children == before:
                break
            for pid in children:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            before = children

    def finish(self) -> list[Proc]:
        """Take every step. The survivors."""
        while True:
            pause = self.step()
            if pause is None:
                return self.survivors
            time.sleep(pause)


def name_list(procs: list[Proc]) -> list[Json]:
    return [{"pid": proc.pid, "name": shown(proc.name)} for proc in procs]


PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def load_prctl() -> Callable[..., int]:
    """The C function prctl. Where Python was built without ctypes, one that always fails."""
    try:
        import ctypes

        prctl: Callable[..., int] = ctypes.CDLL(None).prctl
    except (ImportError, OSError, AttributeError):
        return lambda *_: -1
    return prctl


def adopt_orphans(prctl: Callable[..., int]) -> bool:
    """Become the parent of every descendant whose own parent ends. False if we cannot."""
    return prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def spawn(
    argv: list[bytes],
    environment: dict[bytes, bytes],
    workdir: bytes,
    outputs: tuple[int, int],
    extra: dict[int, int] | None = None,
    prctl: Callable[..., int] | None = None,
) -> tuple[int, OSError | None]:
    """Start a program in a session of its own: its process id, and why it could not be executed.

    It gets /dev/null as stdin, ``outputs`` as stdout and stderr, and of all other descriptors
    only those in ``extra`` (number there -> number here). With ``prctl`` it dies with us.
    """
    me = os.getpid()
    reading, writing = os.pipe()
    before = signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            if prctl is not None:
                prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
                if os.getppid() != me:
                    os._exit(126)
            signal.set_wakeup_fd(-1)
            for signum in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
                with contextlib.suppress(OSError, ValueError):  # the C library's own
                    signal.signal(signum, signal.SIG_DFL)
            null = os.open(os.devnull, os.O_RDONLY)
            wanted = {0: null, 1: outputs[0], 2: outputs[1]}
            wanted.update(extra or {})
            # Out of the way first: a descriptor may have the number that another one is to get.
            aside = {to: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 32) for to, fd in wanted.items()}
            writing = fcntl.fcntl(writing, fcntl.F_DUPFD_CLOEXEC, 32)
            keep = {writing, *aside.values()}
            for fd in map(int, os.listdir("/proc/self/fd")):
                if fd not in keep:
                    with contextlib.suppress(OSError):
                        os.close(fd)
            for to, fd in aside.items():
                os.dup2(fd, to)
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
            os.chdir(workdir)
            raise execute(argv, environment)
        except OSError as error:
            os.write(writing, b"%d %s" % (error.errno or 0, os.fsencode(error.filename or argv[0])))
        except BaseException as error:  # noqa: BLE001
            os.write(writing, b"%d %s" % (errno.EINVAL, repr(error).encode()))
        finally:
            os._exit(127)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    os.close(writing)
    told = b""
    while True:
        part = os.read(reading, 1 << 16)
        if not part:
            break
        told += part
    os.close(reading)
    if not told:
        return pid, None
    code, _, subject = told.partition(b" ")
    return pid, OSError(int(code), os.strerror(int(code)), shown(subject))


def execute(argv: list[bytes], environment: dict[bytes, bytes]) -> OSError:
    """Become ``argv``, searched for as a shell would: the first that is there and may be run.
    If this returns, it returns why not."""
    failure: OSError | None = None
    for path in search(argv[0], environment):
        try:
            os.execve(path, argv, environment)
        except OSError as error:
            error.filename = path
            if failure is None or failure.errno in (errno.ENOENT, errno.ENOTDIR):
                failure = error
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.EACCES):
                break
    if failure is not None and failure.errno != errno.EACCES and b"/" not in argv[0]:
        failure.filename = argv[0]
    return failure or OSError(errno.ENOENT, "", argv[0])


def search(program: bytes, environment: dict[bytes, bytes]) -> list[bytes]:
    """Where ``program`` may be, in order."""
    if b"/" in program:
        return [program]
    folders = environment.get(b"PATH", os.fsencode(os.defpath)).split(b":")
    return [os.path.join(folder or b".", program) for folder in folders]


def oom_kills() -> int:
    """How many processes the kernel has killed for lack of memory: in our cgroup if it can be
    told, on this host otherwise."""
    for line in (read_file("/proc/self/cgroup") or b"").splitlines():
        if line.startswith(b"0::"):
            path = b"/sys/fs/cgroup" + line[3:] + b"/memory.events"
            counted = read_file(path)
            if counted is not None:
                break
    else:
        counted = read_file("/proc/vmstat")
    for line in (counted or read_file("/proc/vmstat") or b"").splitlines():
        if line.startswith(b"oom_kill "):
            return int(line.split()[1])
    return 0


class KernelLog:
    """What the kernel says of trouble from now on, where this user may read it."""

    def __init__(self, path: str = "/dev/kmsg") -> None:
        self._since = time.time()
        self._told = 0
        self._journal_answers = True
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._fd, 0, os.SEEK_END)
        except OSError:
            self._fd = -1

    def read(self) -> list[str]:
        """The lines that matter and are new since the last call."""
        lines: list[bytes] = []
        if self._fd >= 0:
            lines = self._records()
        elif self._journal_answers:
            lines = self._journal()
        found = [line for line in lines if TROUBLE.search(line)]
        return [shown(line[:MAX_LINE]) for line in found[:MAX_LINES]]

    def _records(self) -> list[bytes]:
        found = []
        for _ in range(MAX_RECORDS):
            try:
                data = os.read(self._fd, 8192)
            except BlockingIOError:
                break
            except BrokenPipeError:  # records were overwritten before they were read
                continue
            except OSError:
                break
            if not data:
                break
            # "priority,number,time,flags;message", and lines with details that begin with a space
            found += [
                line.partition(b";")[2] for line in data.splitlines() if not line.startswith(b" ")
            ]
        return found

    def _journal(self) -> list[bytes]:
        """By systemd, which lets administrators read what the kernel itself keeps from them."""
        import subprocess

        command = ["journalctl", "-k", "-q", "-o", "cat", "--no-pager", "--since"]
        try:
            done = subprocess.run(
                [*command, "@%d" % self._since], capture_output=True, timeout=JOURNAL_LIMIT
            )
        except (OSError, subprocess.SubprocessError):
            self._journal_answers = False  # there is none, or it holds up the end of the others
            return []
        lines = done.stdout.splitlines()
        told, self._told = self._told, len(lines)
        return lines[told:]


# The run's folder


def expand(path: str, base: bytes | None = None) -> bytes:
    """An absolute path: `~` is the home folder, and so is what a relative path starts from."""
    home = os.environb.get(b"HOME") or os.fsencode(os.path.expanduser("~"))
    if path == "~" or path.startswith("~/"):
        path_bytes = home + raw(path[1:])
    else:
        path_bytes = os.path.join(base or home, raw(path))
    return os.path.normpath(path_bytes)


def folder_of(command: Json) -> bytes:
    for word in (command["run"], command["host"]):
        if word in ("", ".", "..") or "/" in word or "\0" in word:
            raise RefusedError("agent", "%r cannot be the name of a run or host" % word)
    run_dir = expand(command["run_dir"])
    return os.path.join(run_dir, b"nodes", raw(command["run"]), raw(command["host"]))


def cannot_write(error: OSError, folder: bytes) -> RefusedError:
    """What to tell about a folder or file that could not be made."""
    where = shown(folder)
    hint = "point `cluster.run_dir` at a folder on this host that you can write to"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        parent = folder
        while not os.path.isdir(parent):
            parent = os.path.dirname(parent)
        disk = os.statvfs(parent)
        quota = "your quota is used up" if error.errno == errno.EDQUOT else "the disk is full"
        return RefusedError(
            "disk",
            "%s: %s (%d bytes free)" % (where, quota, disk.f_bavail * disk.f_frsize),
            "free some space, or point `cluster.run_dir` at another disk",
        )
    if error.errno == errno.EROFS:
        return RefusedError("permission", "%s: the file system is read-only" % where, hint)
    if error.errno in (errno.EACCES, errno.EPERM):
        return RefusedError("permission", "%s: permission denied" % where, hint)
    return RefusedError("permission", "%s: %s" % (where, os.strerror(error.errno or 0)), hint)


def make_folder(folder: bytes) -> list[bytes]:
    """Make the run's folder, for its owner alone. Every folder that had to be made, outermost
    first."""
    made: list[bytes] = []
    try:
        missing = [folder]
        while missing:
            try:
                os.mkdir(missing[-1], 0o700)
            except FileNotFoundError:
                missing.append(os.path.dirname(missing[-1]))
            except FileExistsError:
                if missing[-1] == folder or not os.path.isdir(missing[-1]):
                    raise
                missing.pop()
            else:
                os.chmod(missing[-1], 0o700)
                made.append(missing.pop())
        disk = os.statvfs(folder)
        free = disk.f_bavail * disk.f_frsize
        if free < LEAST_FREE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except FileExistsError as error:
        discard(None, made)
        if error.filename == folder:
            raise RefusedError(
                "agent",
                "%s: a run of this name has already been launched here" % shown(folder),
                "every launch needs a name of its own",
            ) from None
        raise cannot_write(OSError(errno.ENOTDIR, ""), error.filename) from None
    except OSError as error:
        refusal = cannot_write(error, folder)
        discard(folder if folder in made else None, made)
        raise refusal from None
    return made


def discard(folder: bytes | None, made: list[bytes]) -> None:
    """Remove the folder of a run that never started, and the folders made for it if empty."""
    if folder is not None:
        with contextlib.suppress(OSError):
            for name in os.listdir(folder):
                os.unlink(os.path.join(folder, name))
        run = os.path.dirname(folder)
        made = [*made, os.path.dirname(run), run, folder]
    for path in reversed(made):
        with contextlib.suppress(OSError):  # another run's folder is in it
            os.rmdir(path)


def create(path: bytes, flags: int = 0) -> int:
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    os.fchmod(fd, 0o600)
    return fd


def save(path: bytes, data: bytes) -> None:
    fd = create(path)
    try:
        write_all(fd, data)
    finally:
        os.close(fd)


class Events:
    """The supervisor's side of the events file: lines of JSON, zeros after the last one."""

    def __init__(self, path: bytes) -> None:
        self._fd = create(path)
        self._end = 0
        self._lock = threading.Lock()
        try:
            os.posix_fallocate(self._fd, 0, RESERVED)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
            os.pwrite(self._fd, b"\0" * RESERVED, 0)

    def append(self, kind: str, **body: Any) -> None:
        event = {"event": kind, "time": time.time(), **body}
        with self._lock:
            if not self._write(encode(event) + b"\n"):
                # The disk is full and the reserve used up: what happened matters more than details.
                event.update({name: None for name in ("error", "ranks") if name in event})
                self._write(encode(event) + b"\n")

    def _write(self, line: bytes) -> bool:
        done = 0
        try:
            while done < len(line):
                done += os.pwrite(self._fd, line[done:], self._end + done)
        except OSError:
            with contextlib.suppress(OSError):
                os.pwrite(self._fd, b"\0" * done, self._end)
            return False
        self._end += len(line)
        return True


def read_events(path: bytes, offset: int) -> list[tuple[Json, int]]:
    """The complete events from ``offset`` on, each with the offset at which the next begins."""
    found: list[tuple[Json, int]] = []
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return found
    try:
        data = os.pread(fd, 4 << 20, offset)
    finally:
        os.close(fd)
    for line in data.partition(b"\0")[0].splitlines(True):
        if not line.endswith(b"\n"):
            break
        offset += len(line)
        with contextlib.suppress(ValueError):  # the offset lay inside a line
            found.append((json.loads(line), offset))
    return found


def all_events(path: bytes) -> list[Json]:
    """Those that are there by now."""
    events: list[Json] = []
    found = read_events(path, 0)
    while found:
        events += [event for event, _ in found]
        found = read_events(path, found[-1][1])
    return events


def last_line(path: bytes) -> int:
    """Where the last line of a file begins, if it is not too long."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        start = max(0, os.fstat(fd).st_size - (4 << 10))
        return start + os.pread(fd, 4 << 10, start).rstrip().rfind(b"\n") + 1
    finally:
        os.close(fd)


def error_report(path: bytes, most: int = MAX_TRACEBACK) -> Json | None:
    """What a worker wrote into its error file (the format of torch's `@record`), cut to size."""
    data = read_file(path, MAX_ERROR_FILE)
    if not data:
        return None
    report: Json = {"message": "", "traceback": "", "time": None}
    try:
        body = json.loads(data)
        said = body["message"] if isinstance(body, dict) and "message" in body else body
        if isinstance(said, dict):
            extra = said.get("extraInfo") or {}
            report["message"] = str(said.get("message", ""))
            report["traceback"] = str(extra.get("py_callstack", ""))
            stamp = extra.get("timestamp")
        else:
            report["message"] = str(said)
            stamp = body.get("timestamp") if isinstance(body, dict) else None
        report["time"] = written = os.stat(path).st_mtime
        # torch writes whole seconds, which would not tell who was first; torchrun copies files.
        if stamp is not None and not 0 <= written - float(stamp) < 2:
            report["time"] = float(stamp)
    except (ValueError, TypeError, AttributeError, OSError, RecursionError):
        if not report["message"]:
            report["message"] = shown(data)
    report["message"] = report["message"][: most // 4]
    report["traceback"] = report["traceback"][-most:]
    return report


def tail_of(path: bytes, lines: int) -> str:
    """The last lines of a log, for a message."""
    data = (read_file(path) or b"")[-4096:].strip()
    return "\n".join(shown(line) for line in data.splitlines()[-lines:])


# What torch's flight recorder holds: the calls of collectives that a rank has made of late. NCCL's
# process group writes it to a file of each rank when it times out, or when it is asked through a
# pipe. The format is a pickle (torch/csrc/distributed/c10d/FlightRecorder.hpp).

FILES = (b"TORCH_FR_DUMP_TEMP_FILE", b"TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""What the files' names begin with: variables of torch 2.13, and of older ones."""
PIPES = b"TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
SIZES = (b"TORCH_FR_BUFFER_SIZE", b"TORCH_NCCL_TRACE_BUFFER_SIZE")


def unpickled(data: bytes) -> Any:
    """The plain data in a pickle. Nothing that it says is called: whatever names a function or
    class is refused."""
    import io
    import pickle  # seldom needed, and takes long to import

    class Plain(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            raise pickle.UnpicklingError("%s.%s is no plain data" % (module, name))

    return Plain(io.BytesIO(data)).load()


class FlightRecorders:
    """Those of all ranks of this host, whose processes have this ``environment``."""

    def __init__(self, environment: dict[bytes, bytes], workdir: bytes) -> None:
        prefix = next((environment[name] for name in FILES if environment.get(name)), b"")
        self._files = os.path.join(workdir, prefix) if prefix else b""
        pipes = environment.get(PIPES)
        self._pipes = os.path.join(workdir, pipes) if pipes else b""
        self._seen: dict[int, tuple[int, int]] = {}
        self._lock = threading.Lock()

    def ask(self, rank: int | None) -> bool:
        """Have a rank write its dump. False where nobody is there to do so."""
        if rank is None or not self._pipes:
            return False
        try:
            fd = os.open(b"%s%d.pipe" % (self._pipes, rank), os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            return False
        with contextlib.suppress(OSError):  # it has been asked before, and not looked yet
            os.write(fd, b"1")
        os.close(fd)
        return True

    def fresh(self) -> list[tuple[int, list[Json]]]:
        """The ranks that have written a dump since the last call, and what is in it."""
        found = []
        folder, name = os.path.split(self._files)
        with self._lock:
            for file in listed(folder) if self._files else []:
                rank = file[len(name) :]
                if file.startswith(name) and rank.isdigit():
                    path = os.path.join(folder, file)
                    groups = self._read(int(rank), path)
                    if groups is not None:
                        found.append((int(rank), groups))
        return found

    def _read(self, rank: int, path: bytes) -> list[Json] | None:
        try:
            status = os.stat(path)
        except OSError:
            return None
        mark = status.st_mtime_ns, status.st_size
        if self._seen.get(rank) == mark or status.st_size > MAX_DUMP:
            return None
        try:
            groups = groups_of(unpickled(read_file(path, MAX_DUMP) or b""))
        except Exception:  # noqa: BLE001 - half written, or not what we know
            return None
        self._seen[rank] = mark
        return groups


def record_flights(environment: dict[bytes, bytes], folder: bytes) -> None:
    """Have torch keep and write what its flight recorder holds, but for what is chosen already."""
    if not any(name in environment for name in SIZES):
        # torch 2.13 warns of the older name.
        environment[SIZES[0]] = b"2000"
    if not any(name in environment for name in FILES):
        for name in FILES:
            environment[name] = os.path.join(folder, b"nccl-trace-")
    environment.setdefault(b"TORCH_NCCL_DUMP_ON_TIMEOUT", b"1")
    trial = os.path.join(folder, b"nccl-trial.pipe")
    with contextlib.suppress(OSError):  # torch would end the process where there can be no pipes
        os.mkfifo(trial)
        os.unlink(trial)
        environment.setdefault(PIPES, os.path.join(folder, b"nccl-ask-"))


def groups_of(dump: Json) -> list[Json]:
    """The last collectives in each process group, from a flight recorder's dump.

    Raises some exception for what is no such dump.
    """
    entries: dict[str, list[Json]] = {}
    for entry in dump["entries"]:
        if not entry["is_p2p"]:
            entries.setdefault(str(entry["process_group"][0]), []).append(entry)
    groups = []
    for name, calls in list(entries.items())[:MAX_GROUPS]:
        ranks = json.loads(dump["pg_config"].get(name, {}).get("ranks", "[]"))
        groups.append(
            {
                "id": name,
                "name": str(calls[-1]["process_group"][1])[:MAX_LINE],
                "ranks": [int(rank) for rank in ranks],
                "calls": [call_of(entry, entry is calls[-1]) for entry in calls[-LATEST:]],
            }
        )
    return groups


def call_of(entry: Json, last: bool) -> Json:
    state, op = entry["state"], str(entry["profiling_name"])[:MAX_LINE]
    tensors = list(zip(entry["input_dtypes"], entry["input_sizes"]))[:MAX_TENSORS]
    frames = list(entry.get("frames", ()))[:MAX_FRAMES] if last else []
    return {
        "seq": int(entry["collective_seq_id"]),
        "op": op,
        "tensors": [[str(kind), [int(size) for size in sizes]] for kind, sizes in tensors],
        # gloo does not tell the state; NCCL also retires what has timed out.
        "done": state == "completed" or bool(entry["retired"] and op.startswith("gloo:")),
        "frames": [
            [str(frame["name"])[:MAX_LINE], str(frame["filename"])[:MAX_LINE], int(frame["line"])]
            for frame in frames
        ],
    }


# Ranks that torchrun starts. Its agent gives each a folder:
#     PET_LOG_DIR/<run>_<random>/attempt_0/<local rank>/{stdout.log,stderr.log,error.json}
# dtrain runs torchrun without restarts of its own, so there is one attempt.

FAILURE = re.compile(rb"rank\s*: (\d+) \(local_rank: (\d+)\)\s+exitcode\s*: (-?\d+) \(pid: \d+\)")
"""One entry of the summary that torchrun writes to stderr."""
NODE_RANK = re.compile(rb"--node[-_]rank[= ](\d+)")
SHORT_TRACEBACK = 4 << 10


class Ranks:
    """Finds the ranks of one torchrun."""

    def __init__(self, path: bytes, argv: list[bytes]) -> None:
        self._stderr, self._logs = path + b".err", path + b".ranks"
        self._node_rank = NODE_RANK.search(b" ".join(argv))
        self._first_seen: dict[bytes, float] = {}
        self._known: dict[bytes, int] = {}  # folder -> rank
        self._pids: dict[int, int | None] = {}  # rank -> process id

    def scan(self, tag: Tag, last: bool = False) -> tuple[list[Json], float]:
        """The ranks not seen before, and seconds until it is worth looking again.

        ``last``: torchrun has exited, so take what there is.
        """
        places = self._places()
        new = [place for place in places if place not in self._known]
        if not new:
            return [], 0.5 if places else 0.02
        now = time.monotonic()
        found = []
        living = self._living(tag)
        for place in new:
            local = int(os.path.basename(place))
            pid, rank = living.get(os.path.join(place, b"error.json"), (None, None))
            if rank is None:
                # It may not have been executed yet, or it came and went between two scans.
                if not last and now - self._first_seen.setdefault(place, now) < 1.0:
                    continue
                rank = self._guess(place, local, len(places))
            self._known[place] = rank
            self._pids[rank] = pid
            logs = place[len(os.path.dirname(self._logs)) + 1 :]
            found.append({"local_rank": local, "rank": rank, "pid": pid, "logs": shown(logs)})
        return found, 0.01

    def living(self, tag: Tag) -> dict[int, int]:
        """Process id by rank."""
        return {rank: pid for pid, rank in self._living(tag).values()}

    def _places(self) -> list[bytes]:
        """The ranks' folders."""
        return [
            os.path.join(self._logs, run, b"attempt_0", local)
            for run in listed(self._logs)
            for local in listed(os.path.join(self._logs, run, b"attempt_0"))
            if local.isdigit()
        ]

    def _living(self, tag: Tag) -> dict[bytes, tuple[int, int]]:
        """Process id and rank by error file."""
        found = {}
        # Oldest last: a rank's own children have the same environment.
        for proc in sorted(members(tag, os.getpid()), key=lambda proc: -proc.start):
            environment = environment_of(proc.pid, having=b"LOCAL_RANK=")
            with contextlib.suppress(KeyError, ValueError):
                path = environment[b"TORCHELASTIC_ERROR_FILE"]
                found[path] = proc.pid, int(environment[b"RANK"])
        return found

    def _guess(self, place: bytes, local: int, count: int) -> int:
        """Ranks of one node are consecutive: tell one from a neighbor's, from what torchrun said,
        or from the node's."""
        for other, rank in self._known.items():
            return rank - int(os.path.basename(other)) + local
        for rank_text, other_local, _ in self._summary():
            return int(rank_text) - int(other_local) + local
        return (int(self._node_rank[1]) * count if self._node_rank else 0) + local

    def _summary(self) -> list[tuple[bytes, bytes, bytes]]:
        return FAILURE.findall((read_file(self._stderr) or b"")[-(256 << 10) :])

    def failures(self) -> list[Json]:
        """What the ranks left behind: their error files, and torchrun's summary."""
        codes = {int(rank): int(code) for rank, _, code in self._summary()}
        found = []
        for place, rank in sorted(self._known.items(), key=lambda item: item[1]):
            report = error_report(os.path.join(place, b"error.json"), SHORT_TRACEBACK)
            if report or rank in codes:
                body: Json = {"rank": rank, "local_rank": int(os.path.basename(place))}
                body["pid"] = self._pids[rank]
                code = codes.get(rank)
                body["exitcode"], body["signal"] = code, None
                if code is not None and code < 0:
                    body["exitcode"], body["signal"] = None, signal_name(-code)
                body.update(report or {"message": "", "traceback": "", "time": None})
                found.append(body)
        return found


def listed(path: bytes) -> list[bytes]:
    try:
        return os.listdir(path)
    except OSError:
        return []


# Sockets and ports


def control_name(run: str, host: str) -> bytes:
    """Of an abstract socket, so that no file system has to carry it; never the same twice."""
    return b"\0dtrain/" + (raw(run) + b"/" + raw(host))[:80] + b"/" + os.urandom(4).hex().encode()


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Process id and user id at the other end."""
    creds = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", creds)
    return pid, uid


def call(name: bytes) -> socket.socket | None:
    """A connection to an abstract socket, if somebody listens and takes it at once."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Where nobody accepts, a full queue would otherwise be waited for without end.
        sock.setblocking(False)
        sock.connect(name)
        sock.setblocking(True)
    except OSError:
        sock.close()
        return None
    return sock


def call_supervisor(record: Json) -> socket.socket | None:
    """A connection to the supervisor that left this ``record``, if it is there and takes it."""
    sock = call(raw(record["socket"]))
    if sock is not None and peer_of(sock) != (record["pid"], os.geteuid()):
        sock.close()
        return None
    return sock


def lives(record: Json) -> bool:
    """Whether the supervisor that left this ``record`` is still a process of this machine."""
    proc = look(record["pid"])
    return proc is not None and proc.alive and proc.start == record["start"]


SIOCGIFADDR = 0x8915


def interface_to(target: str) -> bytes | None:
    """The name of the network interface by which this host reaches ``target``, where the kernel
    has chosen one. Sends nothing there."""
    try:
        found = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)
    except (OSError, ValueError):  # unknown, or no name at all
        return None
    for family, kind, _, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
            probe.connect(address)
            own = socket.inet_pton(family, probe.getsockname()[0].partition("%")[0])
            for _, name in socket.if_nameindex():
                if own in addresses_of(probe, name):
                    return os.fsencode(name)
    return None


def addresses_of(sock: socket.socket, interface: str) -> list[bytes]:
    """Those of the socket's family: all IPv6 ones, the first IPv4 one."""
    if sock.family == socket.AF_INET6:
        lines = (read_file("/proc/net/if_inet6") or b"").splitlines()
        fields = [line.split() for line in lines]
        return [
            bytes.fromhex(one[0].decode()) for one in fields if one[5] == os.fsencode(interface)
        ]
    try:
        asked = struct.pack("256s", os.fsencode(interface))
        return [fcntl.ioctl(sock, SIOCGIFADDR, asked)[20:24]]
    except OSError:  # it has none
        return []


def user_name(uid: int) -> str:
    try:
        import pwd

        return pwd.getpwuid(uid).pw_name
    except (ImportError, KeyError):
        return "with id %d" % uid


def reserve_port(port: int) -> socket.socket:
    """Keep ``port`` for this run as far as other dtrain runs go, and see that it is free.

    Raises RefusedError, naming who holds it where that can be told.
    """
    hint = "stop it, or choose another `job.rendezvous.port`"
    name = b"\0dtrain-port/%d" % port
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        lock.bind(name)
        # Nobody accepts: a connection only tells the asker who listens, and stays in the queue.
        lock.listen(128)
    except OSError:
        lock.close()
        raise RefusedError(
            "port", "port %d is taken by %s" % (port, lock_holder(name)), hint
        ) from None
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            probe = socket.socket(family, socket.SOCK_STREAM)
        except OSError:
            continue  # no IPv6 here
        with probe:
            try:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((address, port))
            except PermissionError:
                lock.close()
                raise RefusedError(
                    "port",
                    "port %d may not be used by ordinary users" % port,
                    "choose a `job.rendezvous.port` of 1024 or above",
                ) from None
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    continue
                lock.close()
                raise RefusedError(
                    "port", "port %d is taken by %s" % (port, port_holder(port)), hint
                ) from None
    return lock


def lock_holder(name: bytes) -> str:
    sock = call(name)
    if sock is None:
        return "another dtrain run"
    pid, uid = peer_of(sock)
    sock.close()
    run = environment_of(pid).get(b"DTRAIN_RUN_ID")
    if run is not None:
        return "another dtrain run, %s" % shown(run)
    return "another dtrain run, of user %s" % user_name(uid)


def port_holder(port: int) -> str:
    inodes: dict[bytes, int] = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in (read_file(table, 1 << 24) or b"").splitlines()[1:]:
            fields = line.split()
            if int(fields[1].rpartition(b":")[2], 16) == port and fields[9] != b"0":
                inodes[b"socket:[" + fields[9] + b"]"] = int(fields[7])
    for name in os.listdir("/proc"):
        if not name.isdigit() or not inodes:
            continue
        folder = b"/proc/" + name.encode() + b"/fd"
        for fd in listed(folder):
            try:
                held = os.readlink(os.path.join(folder, fd)) in inodes
            except OSError:
                continue
            if held:
                words = (read_file("/proc/%s/cmdline" % name) or b"").replace(b"\0", b" ")
                return "process %s (%s)" % (name, shown(words.strip())[:120])
    for uid in inodes.values():
        return "a process of user %s" % user_name(uid)
    return "another process"


# The supervisor


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
        self._sockets: list[socket.socket] = []  # held for the run's life
        self._plan: list[tuple[Worker, list[bytes], dict[bytes, bytes], tuple[int, int]]] = []
        self._workers: dict[int, Worker] = {}
        self._flights: FlightRecorders | None = None
        self._groups: set[int] = set()
        self._sweep: Sweep | None = None
        self._stopping = False
        self._started = False
        self._over = False
        self._next_step = self._next_scan = 0.0
        self._oom_kills = 0
        self._signal = 0  # that asked us to stop
        self._prctl = load_prctl()
        self._subreaper = adopt_orphans(self._prctl)
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
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        name = control_name(request["run"], request["host"])
        listener.bind(name)
        listener.listen(16)
        listener.setblocking(False)
        self._listener = listener
        self._sockets.append(listener)
        self._poll.register(listener, select.POLLIN)

        base = {name: value for name, value in os.environb.items() if name != b"DTRAIN_SETUP"}
        base.setdefault(b"PYTHONUNBUFFERED", b"1")
        for source in (request["environment"], request.get("secrets") or {}):
            base.update({raw(name): raw(value) for name, value in source.items()})
        base.update(self._tag.environment)
        archive = os.path.join(self._folder, b"runtime.zip")
        base[b"PYTHONPATH"] = b":".join(filter(None, [archive, base.get(b"PYTHONPATH")]))
        if request.get("flight_recorder"):
            record_flights(base, self._folder)
            self._flights = FlightRecorders(base, self._workdir)

        python = self._find_python(request.get("python"), base)
        script = request.get("script")
        if script is not None and not os.path.isfile(os.path.join(self._workdir, raw(script))):
            where = "" if os.path.isabs(script) else " in %s" % shown(self._workdir)
            remedy = "set `job.workdir` to its folder on this host, or let `job.sync` send it"
            if os.path.isabs(script):
                remedy = "put it there, or let `job.sync` send it and name it without its folder"
            raise RefusedError("script", "script %s not found%s" % (script, where), remedy)
        for port in request.get("ports") or ():
            self._sockets.append(reserve_port(int(port)))
        try:
            self._events = Events(os.path.join(self._folder, b"events"))
            save(archive, binascii.a2b_base64(request["runtime"]))
            target = request.get("route_to")
            interface = interface_to(target) if target else None
            for body in request["processes"]:
                self._plan.append(self._planned(body, python, base))
                if interface is not None:
                    self._plan[-1][2].setdefault(b"GLOO_SOCKET_IFNAME", interface)
        except OSError as error:
            raise cannot_write(error, self._folder) from None
        record = {
            "pid": os.getpid(),
            "start": own_start(),
            "machine": machine_id(),
            "folder": request["folder"],
            "socket": name.decode("utf-8", "surrogateescape"),
        }
        save(os.path.join(self._folder, b"supervisor"), encode(record))

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
        path = os.path.join(self._folder, worker.name)
        environment = dict(base)
        environment.update({raw(name): raw(value) for name, value in body["environment"].items()})
        environment.update(self._tag.environment)
        environment[b"TORCHELASTIC_ERROR_FILE"] = path + b".error.json"
        if worker.role == "torchrun":
            environment[b"PET_LOG_DIR"] = path + b".ranks"
            environment[b"PET_REDIRECTS"] = b"3"
        argv = [raw(word) for word in body["argv"]]
        if python is not None and body["argv"][0] == self._request["python"]:
            argv[0] = python
        if worker.role == "torchrun":
            worker.ranks = Ranks(path, argv)
        outputs = create(path + b".out", os.O_APPEND), create(path + b".err", os.O_APPEND)
        return worker, argv, environment, outputs

    def _give_up(self, message: Json) -> None:
        """End a run that has not started: nothing stays behind. ``message`` says why."""
        self._sweep_now(self._child_ended)  # what setup left running
        discard(self._folder, [raw(path) for path in self._request["made"]])
        self._say(message)
        self._over = True

    # The life of the run

    def _start(self) -> None:
        self._started = True
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

    def _tell_kernel_log(self) -> None:
        lines = self._kernel_log.read()
        if lines:
            # In the order in which nvidia-smi numbers them.
            gpus = sorted(map(shown, listed(b"/proc/driver/nvidia/gpus")))
            self._events.append("kernel", lines=lines, gpus=gpus)

    def _stop(self, reason: str, grace: float) -> None:
        if not self._stopping:
            self._stopping = True
            self._tell_kernel_log()
            self._tell_collectives()
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
        self._events.append("ended", survivors=name_list(survivors))
        self._over = True

    def _child_ended(self, pid: int, status: int) -> None:
        worker = self._workers.pop(pid, None)
        if worker is not None:
            self._exited(worker, status)
        self._next_step = 0.0

    def _exited(self, worker: Worker, status: int) -> None:
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
        if bad and not self._stopping:
            self._tell_kernel_log()
            self._tell_collectives()
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
        self._events.append("exited", **body)

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
        while b"\n" in pending and not self._over:
            line, _, rest = bytes(pending).partition(b"\n")
            pending[:] = rest
            try:
                command = json.loads(line)
            except ValueError:
                continue
            if isinstance(command, dict):
                self._obey(command)

    def _obey(self, command: Json) -> None:
        op = command.get("op")
        self._heard = time.monotonic()
        if not self._started:
            if op == "start":
                self._start()
            elif op in ("abort", "stop", "kill"):
                self._give_up({"type": "bye"})
        elif op == "stop":
            grace = float(command.get("grace", self._grace))
            self._stop(str(command.get("reason") or "asked by the launcher"), grace)
        elif op == "stacks":
            self._ask_where(bool(command.get("abort")))
        elif op in ("kill", "abort"):
            self._stop(str(command.get("reason") or "asked by the launcher"), 0.0)

    def _say(self, message: Json) -> None:
        for client, _ in self._clients.values():
            with contextlib.suppress(OSError):
                client.send(encode(message) + b"\n")


def missing(failure: OSError) -> bool:
    return failure.errno == errno.ENOENT and not os.path.exists(str(failure.filename))


def why_not_executed(failure: OSError, program: bytes, environment: dict[bytes, bytes]) -> str:
    words = "cannot run %s: %s" % (failure.filename, os.strerror(failure.errno or 0))
    if failure.errno == errno.ENOENT:
        if not missing(failure):
            return words + " (the interpreter in its first line does not exist)"
        if b"/" not in program:
            return words + " on PATH (%s)" % shown(environment.get(b"PATH", b""))
    return words


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "signal %d" % number


def own_start() -> int:
    me = look(os.getpid())
    return me.start if me is not None else 0


def machine_id() -> str:
    """Changes with every start of the machine, and differs between machines."""
    return shown((read_file("/proc/sys/kernel/random/boot_id") or b"").strip())


# The relay


class Stream:
    """One output file, followed."""

    def __init__(self, number: int, path: bytes, offset: int) -> None:
        self.number = number
        self.offset = offset
        self._path = path
        self._fd = -1

    def read(self) -> bytes:
        """What comes next; empty if there is nothing new."""
        try:
            if self._fd < 0:
                self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            return os.pread(self._fd, CHUNK, self.offset)
        except OSError:
            return b""


class Relay:
    """The process on the channel."""

    def __init__(self, stdin: BinaryIO) -> None:
        self._stdin = stdin
        self._folder = b""
        self._tag: Tag | None = None
        self._supervisor: socket.socket | None = None
        self._child = 0  # the supervisor, as long as it is our child
        self._subreaper = False
        self._end = "its end was not seen"
        self._unheard = b""
        self._up = False
        self._aborted = False
        self._events_at = 0
        self._events_from = 0
        self._progress_at = 0.0
        self._attached = False
        self._quiet = False  # only events are wanted
        self._offsets: dict[str, int] = {}
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
            made = make_folder(self._folder)
        except RefusedError as refusal:
            return refusal.message
        try:
            log = create(os.path.join(self._folder, b"agent.log"), os.O_APPEND)
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
        for fd in (log, reading):
            os.close(fd)
        code = marshal.dumps(globals()["code"])
        feed = b"%d\n" % len(code) + code + encode(request)

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
        assert self._supervisor is not None
        if not select.select([self._supervisor], [], [], timeout)[0]:
            return []
        try:
            data = self._supervisor.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            return None
        *lines, self._unheard = (self._unheard + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def _fate(self) -> str:
        """How the supervisor has ended, if it is our child."""
        for _ in range(100):
            if reap(self._child_ended) or self._child == 0:
                break
            time.sleep(0.01)
        return self._end

    # Attaching

    def _attach(self, command: Json) -> None:
        if not os.path.isdir(self._folder):
            raise RefusedError(
                "gone",
                "no run %s on this host (%s does not exist)"
                % (command["run"], shown(self._folder)),
            )
        self._attached = True
        self._quiet = not command.get("outputs", True)
        self._offsets = dict(command.get("offsets") or {})
        self._events_from = self._offsets.get("events", 0)
        self._up = True
        data = read_file(os.path.join(self._folder, b"supervisor"))
        if not data:
            raise RefusedError("agent", "run %s is not prepared yet" % command["run"])
        record = json.loads(data)
        self._tag = Tag(command["run"], command["host"], raw(record["folder"]))
        sock = call_supervisor(record)
        if sock is None and not self._has_ended():
            if record["machine"] != machine_id():
                self._end = RESTARTED
            elif lives(record):
                reason = "the supervisor (process %d) does not answer" % record["pid"]
                raise RefusedError("agent", reason)
        self._supervisor = sock
        self._tell("attached", folder=shown(self._folder), running=sock is not None)
        threading.Thread(target=self._listen, daemon=True).start()
        self._follow()

    def _has_ended(self) -> bool:
        events = all_events(os.path.join(self._folder, b"events"))
        return any(event["event"] == "ended" for event in events)

    # Looking

    def _look(self) -> None:
        """Tell how the run stands here, and do nothing about it."""
        events = all_events(os.path.join(self._folder, b"events"))
        started = [event for event in events if event["event"] == "started"]
        exited = {
            (event["role"], event["index"]): event for event in events if event["event"] == "exited"
        }
        processes = []
        for event in started:
            end = exited.get((event["role"], event["index"]), {})
            names = {name: event[name] for name in ("role", "index", "rank", "pid")}
            fate = {"ended": end.get("time"), "code": end.get("code"), "signal": end.get("signal")}
            processes.append({**names, "started": event["time"], **fate})
        ended = [event["time"] for event in events if event["event"] == "ended"]
        if ended:
            state, since, why = "ended", ended[0], ""
        else:
            state, why = self._standing(bool(started))
            since = started[0]["time"] if started and state == "running" else None
        self._tell("status", state=state, since=since, why=why, processes=processes)

    def _standing(self, started: bool) -> tuple[str, str]:
        """The state of a run that has told of no end, and why it is in that state."""
        if not os.path.isdir(self._folder):
            return "missing", "%s does not exist" % shown(self._folder)
        data = read_file(os.path.join(self._folder, b"supervisor"))
        if not data:
            return "preparing", ""
        record = json.loads(data)
        sock = call_supervisor(record)
        if sock is not None:
            sock.close()
            return "running" if started else "ready", ""
        if record["machine"] != machine_id():
            return "gone", RESTARTED
        if lives(record):
            return "running", "its supervisor (process %d) does not answer" % record["pid"]
        return "gone", "something ended its supervisor"

    # Following

    def _follow(self) -> None:
        """Send what is new until the run is over and everything has been sent."""
        # Kills, if it comes to that: no signal handler runs while the connection takes no bytes.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(ALONE)
        pause = QUICK
        while True:
            heard = self._hear(pause) if self._supervisor is not None else None
            reap(self._child_ended)
            for message in heard or ():
                if message["type"] in ("refused", "bye"):  # it gave up before the start
                    self._send(message)
                    return
            gone = heard is None
            over = self._ended or gone
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
        self._tell("bye")

    def _relay_events(self) -> bool:
        found = read_events(os.path.join(self._folder, b"events"), self._events_at)
        for event, end in found:
            self._events_at = end
            if event["event"] == "started":
                name = "%s-%d" % (event["role"], event["index"])
                path = os.path.join(self._folder, raw(name))
                self._add(name, path + b".out", path + b".err", event["role"], event)
            elif event["event"] == "rank":
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
        for file in listed(self._folder):
            name = shown(file)
            if not name.endswith(".progress"):
                continue
            path = os.path.join(self._folder, file)
            if name not in self._offsets and self._attached:
                # Whoever takes up a run wants to know where it is, not where it has been.
                self._offsets[name] = start = last_line(path)
                for said, end in read_events(path, 0):
                    page = isinstance(said, dict) and said.get("event") == "tensorboard"
                    if page and end <= start:
                        self._tell("progress", name=name, offset=start, said=said)
            for said, end in read_events(path, self._offsets.get(name, 0)):
                found = True
                self._offsets[name] = end
                self._tell("progress", name=name, offset=end, said=said)
        return found

    def _add(self, name: str, out: bytes, err: bytes, role: str, event: Json) -> None:
        if self._quiet:
            return
        rank = event["rank"]
        index = rank if event["event"] == "rank" else event["index"]
        for fd, suffix, path in (("stdout", ".out", out), ("stderr", ".err", err)):
            full = name + suffix
            stream = Stream(len(self._streams) + 1, path, self._offsets.get(full, 0))
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
        self._tell(
            "lost",
            reason="the supervisor died: %s%s" % (fate, "\n" + log if log else ""),
            survivors=name_list(survivors),
        )
        self._ended = True
        self._supervisor = None

    # Both ways

    def _listen(self) -> None:
        """Pass commands on, whatever the other thread waits for. Runs in a thread of its own."""
        for line in iter(self._stdin.readline, b""):
            if signal.alarm(0):
                signal.alarm(ALONE)
            if self._up:
                self._forward(line)
            elif b'"ping"' not in line:
                self._aborted = True
        # Nobody is there any more. What is not yet started the supervisor or the guard undoes.
        os._exit(0)

    def _forward(self, line: bytes) -> None:
        supervisor = self._supervisor
        if supervisor is not None:
            with contextlib.suppress(OSError):
                supervisor.sendall(line)

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
    command = [sys.executable, "-ESs", "-c", STAGE, "dtrain-supervisor"]
    command += [request["run"], request["host"]]
    lines.append("exec " + " ".join(map(quoted, command)))
    return "\n".join(lines)


# Main


def main() -> None:
    """`boot` and `code` were left in our globals by what loaded this file: the stream that it
    came from, which goes on with commands or the request, and its compiled code."""
    boot: BinaryIO = globals()["boot"]
    if sys.argv[1] == "dtrain-supervisor":
        request = json.load(boot)
        boot.close()
        control = socket.socket(fileno=CONTROL_FD)
        control.set_inheritable(False)
        Supervisor(request, control).run()
    else:
        Relay(boot).run()
    sys.stderr.flush()
    os._exit(0)  # daemon threads and all


if __name__ == "__main__":
    main()
