"""Finds and ends all processes of a run.

All descendants of the supervisor belong to the run, whatever their environment contains, and all
processes with the run's tag. The supervisor is a subreaper, so descendants stay below it when
their parents end. The only exception is a run inside a run: the supervisor of the inner run, known
by its record, and its descendants.

These processes can still escape:

- a process that a service outside the run starts (cron, a container engine, ``ssh localhost``)
  without the tag;
- a process that starts a run of its own, or that fakes a supervisor's record for itself;
- after the supervisor itself was killed, or where it cannot become a subreaper: a process without
  the tag whose parent has ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

from dtrain.node.agent.control import MAX_RECORD
from dtrain.node.agent.processes import (
    Proc,
    children_of,
    environment_of,
    look,
    processes,
    reap,
    send,
)
from dtrain.node.agent.wire import raw
from dtrain.node.agent.worker_files import decode, read_regular

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess
    from typing import Callable, Iterator, Sequence

PATIENCE = 10.0
"""Seconds of KILL before a remaining process counts as a survivor."""
ABORT_LIMIT = 5.0
"""Seconds for Python to write its stack after SIGABRT."""

HELPERS: set[int] = set()
"""Our children that no sweep ends, because they end by themselves."""
STARTING = threading.Lock()
"""Held while a helper starts, so that no sweep sees a child that is not in `HELPERS` yet."""

START_LIMIT = 1.0
"""Seconds that a sweep waits for a helper's start."""
TAG = b"DTRAIN_RUN_ID", b"DTRAIN_HOST", b"DTRAIN_RUN_DIR"
"""The variables of `Tag`."""


def start_helper(argv: Sequence[str | bytes]) -> subprocess.Popen[bytes]:
    """Start a program whose output we read, as a child that no sweep ends. Its caller takes it out
    of `HELPERS`. Raises OSError.

    Without our tag: it is not one of the processes of a run that `dtrain check` counts. Without the
    variables of a hook of Git, which name the hook's repository.
    """
    import subprocess

    env = {
        name: value
        for name, value in os.environb.items()
        if name not in TAG and not name.startswith(b"GIT_")
    }
    with STARTING:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**env, b"LC_ALL": b"C"},
            start_new_session=True,
        )
        HELPERS.add(process.pid)
    return process


@contextlib.contextmanager
def between_starts() -> Iterator[None]:
    """No helper starts inside this context, except one whose start hangs, for example on a file
    server that does not answer."""
    held = STARTING.acquire(timeout=START_LIMIT)
    try:
        yield
    finally:
        if held:
            STARTING.release()


class Tag:
    """The variables in the environment of all processes of one run on one host.

    The folder makes the tag unique: each launch creates a new one.
    """

    def __init__(self, run: str, host: str, folder: bytes) -> None:
        self.environment = dict(zip(TAG, (raw(run), raw(host), folder)))

    def of(self, pid: int) -> bool | None:
        """True for a process with this run's tag, False for the supervisor of another run, None
        for other processes. Any process can set a tag, so another run's tag proves nothing."""
        entries = environment_of(pid, having=b"DTRAIN_RUN_DIR=")
        found = {name: entries.get(name) for name in self.environment}
        if found == self.environment:
            return True
        folder = found[b"DTRAIN_RUN_DIR"]
        if folder and folder != self.environment[b"DTRAIN_RUN_DIR"] and supervises(pid, folder):
            return False
        return None


def supervises(pid: int, folder: bytes) -> bool:
    """Whether a process is the supervisor whose record is in a run's ``folder``."""
    record = decode(read_regular(os.path.join(folder, b"supervisor"), MAX_RECORD) or b"") or {}
    proc = look(pid)
    return proc is not None and (record.get("pid"), record.get("start")) == (pid, proc.start)


def members(tag: Tag, root: int) -> list[Proc]:
    """The living processes of a run: descendants of ``root`` if it is not 0, tagged processes, and
    their descendants. Without supervisors of other runs and their descendants.
    """
    with between_starts():
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
            if proc.pid in found or proc.pid in (me, root) or proc.pid in HELPERS:
                continue
            if tag.of(proc.pid) is False:
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


def await_ends(procs: list[Proc], limit: float) -> None:
    """Wait up to ``limit`` seconds until all ``procs`` have ended."""
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        now = [(proc, look(proc.pid)) for proc in procs]
        if not any(one is not None and one.alive and one.start == proc.start for proc, one in now):
            break
        time.sleep(0.02)


_SCANS_PROVEN, _SCANS = 2, 20
"""Scans in a row that must find nothing, with and without the proof of a subreaper."""


class Sweep:
    """Ends the processes of a run, one step at a time.

    A scan of /proc can miss a process that repeatedly forks and exits. The kernel does not: a
    subreaper has a child as long as it has any living descendant. So a subreaper is done when only
    children of other runs are left, and it kills a process that keeps forking when that becomes
    its child. Scans find deeper descendants, and processes of setup, which are not below us.
    Without a subreaper, many scans replace the proof.
    """

    def __init__(
        self,
        tag: Tag,
        grace: float,
        take: Callable[[int, int], None] | None,
        subreaper: bool = True,
        groups: frozenset[int] | set[int] = frozenset(),
        contained: bool = False,
    ) -> None:
        """``take`` gets the process id and status of each child that ends; None if the run's
        processes are not our descendants. ``groups`` are process groups that contain only
        processes of this run. ``contained``: only tagged processes and their descendants get TERM,
        because the others serve them, see `dtrain.node.agent.containers`."""
        self._tag, self._take, self._groups = tag, take, set(groups)
        self._contained = contained
        self._proof = subreaper and take is not None
        self.kill_at = time.monotonic() + grace
        self.survivors: list[Proc] = []
        self._terminated: set[tuple[int, int]] = set()
        self._last: set[int] = set()
        self._clean = 0
        self._ended: set[int] = set()

    def step(self) -> float | None:
        """Do what is due. Returns the seconds until the next step, or None when it is over."""
        now = time.monotonic()
        if now >= self.kill_at:
            self._strike()
        childless = self._take is not None and reap(self._take)
        found = members(self._tag, os.getpid() if self._take is not None else 0)
        children = self._children()
        if not found and not children:
            self._clean += 1
            proven = self._proof and (childless or children is not None)
            return 0.01 if self._clean < (_SCANS_PROVEN if proven else _SCANS) else None
        self._clean = 0
        if now < self.kill_at:
            self._terminate(members(self._tag, 0) if self._contained else found)
            return min(0.1, self.kill_at - now)
        if now > self.kill_at + PATIENCE and self._give_up(found, children or ()):
            return None
        return 0.0 if self._kill(found) else 0.02

    def _terminate(self, procs: list[Proc]) -> None:
        """Send TERM once to each process."""
        for proc in procs:
            if (proc.pid, proc.start) not in self._terminated:
                self._terminated.add((proc.pid, proc.start))
                send(proc, signal.SIGTERM)
                if proc.state == b"T":
                    send(proc, signal.SIGCONT)

    def _give_up(self, found: list[Proc], children: Sequence[int]) -> bool:
        """Whether the remaining processes cannot be ended: they are the survivors."""
        seen = found or [proc for proc in map(look, children) if proc is not None]
        alive = [proc for proc in seen if proc.alive]
        # We cannot reap an ended child that a debugger traces; other children are reaped now.
        before, self._ended = self._ended, {proc.pid for proc in seen}
        if not alive and self._ended != before:
            return False
        self.survivors = alive or seen
        return True

    def _kill(self, found: list[Proc]) -> bool:
        """Send KILL to all. Returns whether some are new since the last step."""
        # Killing a group is atomic: none of its processes can fork in between.
        self._groups.update(proc.pid for proc in found if proc.pid == proc.pgrp)
        for group in self._groups.intersection(proc.pgrp for proc in found):
            with contextlib.suppress(OSError):
                os.killpg(group, signal.SIGKILL)
        for proc in found:
            send(proc, signal.SIGKILL)
        pids = {proc.pid for proc in found}
        new, self._last = pids - self._last, pids
        return bool(new)

    def _children(self) -> list[int] | None:
        """Our children that belong to the run, or None if the kernel does not list them."""
        with between_starts():
            found = children_of("self") if self._proof else None
        return found and [
            pid for pid in found if pid not in HELPERS and self._tag.of(pid) is not False
        ]

    def _strike(self) -> None:
        """Kill our children, and the orphans that become our children by that, as fast as
        possible."""
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
        """Take all steps. Returns the survivors."""
        while True:
            pause = self.step()
            if pause is None:
                return self.survivors
            time.sleep(pause)


PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_SET_PTRACER = 1, 36, 0x59616D61


def load_prctl() -> Callable[..., int]:
    """The C function prctl, or a function that always fails if Python has no ctypes."""
    try:
        import ctypes

        prctl: Callable[..., int] = ctypes.CDLL(None).prctl
    except (ImportError, OSError, AttributeError):
        return lambda *_: -1
    return prctl


def adopt_orphans(prctl: Callable[..., int]) -> bool:
    """Become the parent of every descendant whose parent ends. Returns False on failure."""
    return prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
