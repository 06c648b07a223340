"""CPU, memory and open files of each rank's process and its descendants."""

from __future__ import annotations

import os
import time

from dtrain.launchplan.names import reporter_name
from dtrain.node.agent.processes import processes
from dtrain.node.files import listed, read_file
from dtrain.node.sockets import inodes_of
from dtrain.node.telemetry.host import TICKS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

    from dtrain.node.agent.processes import Proc
    from dtrain.node.agent.wire import Json

FIRST_SCAN, LONGEST = 1.0, 16.0
"""Seconds between two searches for the processes of each rank, which read all of /proc: at first,
and at most."""
MAX_PROCESSES = 1024
MAX_FILES = 4096
"""Open files that one search looks at for sockets: each costs microseconds."""
PAGE = os.sysconf("SC_PAGE_SIZE")


class RankCounters:
    def __init__(self, running: Callable[[], list[tuple[Json, Proc]]]) -> None:
        """``running`` returns the identity and process of each rank."""
        self._running = running
        self._until, self._pause = 0.0, FIRST_SCAN
        self._trees: dict[str, list[int]] = {}
        self._files: dict[str, int] = {}
        self.sockets: set[int] = set()
        """The inodes of all sockets of the ranks."""
        self._ticks: dict[tuple[int, bytes], int] = {}
        self._last = time.monotonic()

    def read(self) -> list[list[Any]]:
        now = time.monotonic()
        if now >= self._until:
            self._until = now + self._pause
            self._pause = min(2 * self._pause, LONGEST)
            self._search()
        seconds, self._last = now - self._last, now
        before, self._ticks = self._ticks, {}
        return [
            [name, *self._use(pids, before, seconds), self._files[name]]
            for name, pids in self._trees.items()
        ]

    def _use(
        self, pids: list[int], before: dict[tuple[int, bytes], int], seconds: float
    ) -> tuple[float | None, int]:
        """Busy CPUs since the last `read` (None at first), and resident bytes."""
        ticks, known, memory = 0, False, 0
        for pid in pids:
            stat = read_file("/proc/%d/stat" % pid)
            if not stat:
                continue
            fields = stat[stat.rfind(b")") + 2 :].split()
            key = pid, fields[19]  # with its start time
            self._ticks[key] = spent = int(fields[11]) + int(fields[12])
            memory += int(fields[21]) * PAGE
            if key in before:
                known = True
                ticks += spent - before[key]
        return round(ticks / TICKS / seconds, 2) if known and seconds > 0 else None, memory

    def _search(self) -> None:
        """Find the processes of each rank, and count their open files."""
        children: dict[int, list[int]] = {}
        for proc in processes().values():
            children.setdefault(proc.ppid, []).append(proc.pid)
        left, files_left = MAX_PROCESSES, MAX_FILES
        self._trees, self._files = {}, {}
        self.sockets = set()
        running = self._running()
        for place, (identity, root) in enumerate(running):
            name = reporter_name(identity["role"], identity["index"], identity["rank"])
            # So that no rank is left out because others have many processes.
            share = left // (len(running) - place)
            found: list[int] = []
            pending = [root.pid]
            while pending and len(found) < share:
                found.append(pending.pop())
                pending += children.get(found[-1], ())
            left -= len(found)
            self._trees[name] = found
            self._files[name], share = 0, files_left // (len(running) - place)
            for pid in found:
                names = listed("/proc/%d/fd" % pid)
                self._files[name] += len(names)
                self.sockets.update(inodes_of(pid, names[:share]))
                files_left -= len(names[:share])
                share -= len(names[:share])
