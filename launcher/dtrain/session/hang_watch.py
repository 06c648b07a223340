"""Notices that a job has hung, and where: the watchdog of one attempt."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from enum import Enum, auto

from dtrain import hostlist
from dtrain.failures import collectives
from dtrain.failures.stacks import compare, place, stack
from dtrain.runs.log_store import tail
from dtrain.session.context import AttemptContext
from dtrain.session.link import Link

STDERR_TAIL = 1 << 16
"""Bytes at the end of a worker's stderr in which its stack is searched."""
STACKS_SECONDS = 40.0
"""Seconds that hosts have to report where their workers are."""


class Silence(Enum):
    """What the watchdog knows about the job."""

    NONE = auto()
    """The job has reported something recently, or the network is the one that is silent."""
    ASKED = auto()
    """The hosts are asked where their workers are."""
    HUNG = auto()
    """The job is to end."""


class HangWatch:
    """Only the attempt's thread calls it."""

    def __init__(self, context: AttemptContext, links: Mapping[str, Link]) -> None:
        self._context = context
        self._links = links
        self._watchdog = context.plan.job.watchdog
        self._silence = Silence.NONE
        self._since = math.inf
        self._asked_at = 0.0

    def start(self) -> None:
        """The workers run."""
        self._since = time.monotonic()

    @property
    def why(self) -> str:
        """What the watchdog has seen, once it has acted; empty before."""
        if self._silence is Silence.NONE:
            return ""
        return f"no output and no progress from any worker for {self._watchdog.silence:g} s"

    def has_hung(self) -> bool:
        """Whether the running job has been silent for so long that it is to end.

        First every host is asked where its workers are, and has some seconds to find out.
        """
        if self._watchdog.silence is None:
            return False
        now = time.monotonic()
        if not all(link.reachable for link in self._links.values()):
            # It is the network that is silent.
            self._since, self._silence = now, Silence.NONE
        elif self._silence is Silence.NONE:
            last = (link.evidence.last_activity for link in self._links.values())
            if now >= max(self._since, *last) + self._watchdog.silence:
                self._ask(now)
        elif self._silence is Silence.ASKED and self._answered(now):
            if self._watchdog.then == "report":
                for line in self.where():
                    self._context.notice(line)
                self._since, self._silence = now, Silence.NONE
            else:
                self._silence = Silence.HUNG
        return self._silence is Silence.HUNG

    def _ask(self, now: float) -> None:
        self._silence, self._asked_at = Silence.ASKED, now
        self._context.notice(f"{self.why}; asking each where it is")
        for link in self._links.values():
            link.request_stacks(abort=self._watchdog.then != "report")

    def _answered(self, now: float) -> bool:
        return now >= self._asked_at + STACKS_SECONDS or all(
            link.evidence.stacks_complete or link.reported_end for link in self._links.values()
        )

    def where(self) -> list[str]:
        """Which workers wait where, a line for each place."""
        sizes = self._context.folder.sizes(self._context.plan)
        streams = [stream for stream in sizes if stream.fd == "stderr"]
        with_ranks = {stream.host for stream in streams if stream.rank is not None}
        places = {}
        for stream in streams:
            reported = self._links[stream.host].evidence.stacks.get(stream.label)
            if not reported and stream.role == "torchrun" and stream.host in with_ranks:
                continue  # It only looks after its ranks.
            text = reported or tail(stream.path, STDERR_TAIL).decode(errors="replace")
            places[stream.label, stream.host] = place(stack(text))
        if not any(where.script or where.call for where in places.values()):
            unknown = "no worker told where it is; py-spy on the hosts can tell of any"
            return self.out_of_step() or [unknown]
        labels = {f"{label} {host}": where for (label, host), where in places.items()}
        stacks = [f"{_workers(those)}: in {where}" for where, those in compare(labels)]
        return stacks + self.out_of_step()

    def out_of_step(self) -> list[str]:
        """The collectives that not all ranks have joined, from torch's flight recorders."""
        return collectives.compare(
            {
                rank: groups
                for link in self._links.values()
                for rank, groups in link.evidence.collectives.copy().items()
            }
        )


def _workers(who: list[str]) -> str:
    """``rank 3 on gpu01``, ``ranks 0-2,4-7 on gpu[01-02]``, from ``3 gpu01`` and so on."""
    labels, hosts = zip(*(each.split(" ", 1) for each in who), strict=True)
    ranks = sorted(int(label) for label in labels if label.isdecimal())
    names = hostlist.fold(list(dict.fromkeys(hosts)))
    if len(ranks) < len(labels):
        return f"{', '.join(labels)} on {names}"
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} on {names}"
