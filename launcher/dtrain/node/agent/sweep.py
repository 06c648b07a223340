"""Which processes belong to a run, and how to end all of them.

The descendants of its supervisor belong to a run, whatever is in their environment, and so does
every process with the run's tag. The supervisor is a subreaper, so that descendants stay below it
when their parents end. The one exception is a run inside a run: the supervisor of the inner run,
known by its record, and all below it.

What can still escape:

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
import time

from dtrain.node.agent.control import MAX_RECORD
from dtrain.node.agent.processes import (
    Proc,
    environment_of,
    look,
    own_children,
    processes,
    reap,
    send,
)
from dtrain.node.agent.wire import raw
from dtrain.node.agent.worker_files import decode, read_regular

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable

PATIENCE = 10.0
"""Seconds of KILL before what is left counts as a survivor."""
ABORT_LIMIT = 5.0
"""Seconds in which Python should have written its stack after SIGABRT."""

HELPERS: set[int] = set()
"""Children of ours that no sweep ends: they end by themselves."""


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
        """True for a process with this run's tag, False for the supervisor of another run, None
        for all others. Any process can set a tag, so another run's alone proves nothing."""
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
    """The living processes of a run: below ``root`` (itself left out) if it is not 0, or tagged,
    or below those. The supervisors of other runs and all below them are left out.
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
        self._ended: set[int] = set()

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
            alive = [proc for proc in seen if proc.alive]
            # An ended child that a debugger traces cannot be reaped; another one is by now.
            before, self._ended = self._ended, {proc.pid for proc in seen}
            if alive or self._ended == before:
                self.survivors = alive or seen
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
        return found and [
            pid for pid in found if pid not in HELPERS and self._tag.of(pid) is not False
        ]

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
