"""Finds the ranks that torchrun has started."""

from __future__ import annotations

import contextlib
import os
import re
import time

from dtrain.node.agent.evidence import FAILURE, SHORT_TRACEBACK, error_report
from dtrain.node.agent.processes import environment_of, signal_name
from dtrain.node.agent.sweep import Tag, members
from dtrain.node.agent.wire import shown
from dtrain.node.agent.worker_files import read_regular
from dtrain.node.files import listed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dtrain.node.agent.wire import Json

MAX_SUMMARY = 256 << 10
"""Bytes at the end of torchrun's stderr, which reports how its ranks ended."""
MAX_DIGITS = 6
"""Digits of a rank."""
NODE_RANK = rb"--node[-_]rank[= ](\d+)"


class Ranks:
    """Finds the ranks of one torchrun.

    Workers can write folders, environments and messages with any numbers. So ranks outside the
    job are ignored, and local ranks that this torchrun does not start.
    """

    def __init__(self, path: bytes, argv: list[bytes], count: int, world_size: int) -> None:
        """``count``: the number of ranks that this torchrun starts."""
        self._count, self._world_size = count, world_size
        self._stderr, self._logs = path + b".err", path + b".ranks"
        self._node_rank = re.search(NODE_RANK, b" ".join(argv))
        self._first_seen: dict[bytes, float] = {}
        self._known: dict[bytes, int] = {}  # folder -> rank
        self._ignored: set[bytes] = set()
        self._pids: dict[int, int | None] = {}  # rank -> process id

    def scan(self, tag: Tag, last: bool) -> tuple[list[Json], float]:
        """The new ranks, and the seconds until the next scan.

        ``last``: torchrun has exited, so this is the last scan.
        """
        places = self._places()
        seen = self._ignored.union(self._known)
        new = [place for place in places if place not in seen]
        if not new:
            return [], 0.5 if places else 0.02
        now = time.monotonic()
        found = []
        living = self._living(tag)
        for place in new:
            local = int(os.path.basename(place))
            pid, rank = living.get(os.path.join(place, b"error.json"), (None, None))
            if rank is None:
                # Its process may not have started yet, or may have ended between two scans.
                if not last and now - self._first_seen.setdefault(place, now) < 1.0:
                    continue
                rank = self._guess(local)
            if rank in self._pids or not 0 <= rank < self._world_size:
                self._ignored.add(place)
                continue
            self._known[place] = rank
            self._pids[rank] = pid
            logs = place[len(os.path.dirname(self._logs)) + 1 :]
            found.append({"rank": rank, "logs": shown(logs)})
        return found, 0.01

    def started(self) -> dict[int, int | None]:
        """The process ids of all ranks that were found, if known."""
        return self._pids.copy()

    def living(self, tag: Tag) -> dict[int, int]:
        """The process ids of the running ranks."""
        return {rank: pid for pid, rank in self._living(tag).values()}

    def _places(self) -> list[bytes]:
        """The ranks' folders."""
        return [
            os.path.join(self._logs, run, b"attempt_0", local)
            for run in listed(self._logs)
            for local in listed(os.path.join(self._logs, run, b"attempt_0"))
            if local.isdigit() and len(local) <= MAX_DIGITS and int(local) < self._count
        ]

    def _living(self, tag: Tag) -> dict[bytes, tuple[int, int]]:
        """The process id and rank of each running rank, by its error file."""
        found = {}
        # Oldest last: a rank's own children have the same environment.
        for proc in sorted(members(tag, os.getpid()), key=lambda proc: -proc.start):
            environment = environment_of(proc.pid, having=b"LOCAL_RANK=")
            with contextlib.suppress(KeyError):
                path, rank = environment[b"TORCHELASTIC_ERROR_FILE"], environment[b"RANK"]
                if rank.isdigit() and len(rank) <= MAX_DIGITS and int(rank) < self._world_size:
                    found[path] = proc.pid, int(rank)
        return found

    def _guess(self, local: int) -> int:
        """The rank of local rank ``local``. The ranks of a node are consecutive, so it follows from
        a known rank, from torchrun's summary, or from the node rank."""
        for other, rank in self._known.items():
            return rank - int(os.path.basename(other)) + local
        for rank_text, other_local, *_ in self._summary():
            return int(rank_text) - int(other_local) + local
        return (int(self._node_rank[1]) * self._count if self._node_rank else 0) + local

    def _summary(self) -> list[tuple[bytes, bytes, bytes, bytes]]:
        """Rank, local rank, exit code and process id of each rank in torchrun's summary."""
        return re.findall(FAILURE, read_regular(self._stderr, MAX_SUMMARY, -MAX_SUMMARY) or b"")

    def failures(self) -> list[Json]:
        """The failed ranks, from their error files and torchrun's summary."""
        codes = {int(rank): (int(code), int(pid)) for rank, _, code, pid in self._summary()}
        found = []
        for place, rank in sorted(self._known.items(), key=lambda item: item[1]):
            report = error_report(os.path.join(place, b"error.json"), SHORT_TRACEBACK)
            if report or rank in codes:
                body: Json = {"rank": rank}
                code, pid = codes.get(rank, (None, None))
                # A rank that ended at once was never seen.
                body["pid"] = self._pids[rank] or pid
                body["exitcode"], body["signal"] = code, None
                if code is not None and code < 0:
                    body["exitcode"], body["signal"] = None, signal_name(-code)
                body.update(report or {"message": "", "traceback": "", "time": None})
                found.append(body)
        return found
