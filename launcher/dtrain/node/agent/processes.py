"""The processes of this host, from /proc."""

from __future__ import annotations

import contextlib
import errno
import os
import signal

from dtrain.node.agent.wire import shown
from dtrain.node.files import read_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable

    from dtrain.node.agent.wire import Json

MAX_DESCENDANTS = 4096


class Proc:
    """One line of /proc/PID/stat. Process id and start time together identify a process."""

    __slots__ = ("alive", "name", "pgrp", "pid", "ppid", "start", "state")

    def __init__(self, pid: int, stat: bytes) -> None:
        # The name is in parentheses and may itself contain parentheses and spaces.
        head, _, tail = stat.rpartition(b")")
        fields = tail.split()
        self.pid = pid
        self.name = head.partition(b"(")[2]
        self.state = fields[0]
        self.ppid = int(fields[1])
        self.pgrp = int(fields[2])
        self.start = int(fields[19])
        # If only the main thread has ended, a zombie still runs its other threads.
        self.alive = self.state not in (b"Z", b"X") or int(fields[17]) > 1


def look(pid: int) -> Proc | None:
    stat = read_file("/proc/%d/stat" % pid)
    return Proc(pid, stat) if stat else None


def processes() -> dict[int, Proc]:
    """All processes of this host, by id. Reads the newest first, as they may end soonest."""
    pids = sorted((int(name) for name in os.listdir("/proc") if name.isdigit()), reverse=True)
    found = map(look, pids)
    return {proc.pid: proc for proc in found if proc is not None}


def children_of(pid: int | str) -> list[int] | None:
    """The children of a process, including those that have ended; None if it has ended itself, or
    if this kernel does not list them. ``"self"``: ours, whose ids are not reused until we wait for
    them."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir("/proc/%s/task" % pid):
            data = read_file("/proc/%s/task/%s/children" % (pid, task))
            if data is None:
                return None
            found += map(int, data.split())
    return found


def descendants(root: int) -> list[int]:
    """A process and its descendants. A host may have thousands of others, so it reads only these
    where the kernel lists children."""
    table: dict[int, list[int]] | None = None
    if children_of("self") is None:
        table = {}
        for proc in processes().values():
            table.setdefault(proc.ppid, []).append(proc.pid)
    found: list[int] = []
    pending = [root]
    # Limited, because they may fork meanwhile.
    while pending and len(found) < MAX_DESCENDANTS:
        pid = pending.pop()
        found.append(pid)
        pending += (children_of(pid) or ()) if table is None else table.get(pid, ())
    return found


def reap(take: Callable[[int, int], None]) -> bool:
    """Call ``take`` with the process id and status of every child that has ended. Returns whether
    no child is left."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return True
        if pid == 0:
            return False
        take(pid, status)


def environment_of(pid: int, having: bytes = b"") -> dict[bytes, bytes]:
    """The initial environment of a process; empty if it cannot be read or does not contain
    ``having``."""
    data = read_file("/proc/%d/environ" % pid) or b""
    found: dict[bytes, bytes] = {}
    if having in data:
        for entry in data.split(b"\0"):
            name, equals, value = entry.partition(b"=")
            if equals:
                found.setdefault(name, value)
    return found


def send(proc: Proc, signum: int) -> None:
    """Signal ``proc``, and never another process with a recycled process id."""
    pidfd = -1
    if hasattr(os, "pidfd_open"):
        try:
            pidfd = os.pidfd_open(proc.pid)
        except OSError as error:
            # Other errors are not about the process: older containers forbid the system call.
            if error.errno == errno.ESRCH:
                return
    now = look(proc.pid)
    with contextlib.suppress(OSError):  # it has ended, or we may not signal it: the next scan shows
        if now is not None and now.start == proc.start:
            if pidfd >= 0:
                signal.pidfd_send_signal(pidfd, signum)
            else:
                os.kill(proc.pid, signum)
    if pidfd >= 0:
        os.close(pidfd)


def name_list(procs: list[Proc]) -> list[Json]:
    return [{"pid": proc.pid, "name": shown(proc.name)} for proc in procs]


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "signal %d" % number


def exit_of(status: int) -> tuple[int | None, str | None]:
    """The exit code in a wait status, or the name of the signal that ended the process."""
    if os.WIFSIGNALED(status):
        return None, signal_name(os.WTERMSIG(status))
    return os.WEXITSTATUS(status), None


def own_start() -> int:
    me = look(os.getpid())
    return me.start if me is not None else 0
