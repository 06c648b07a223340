"""Where the workers of one attempt are, from the stacks that their hosts report."""

from __future__ import annotations

from collections.abc import Mapping

from dtrain import hostlist
from dtrain.failures import collectives, nccl_ras
from dtrain.failures.cause import workers_on
from dtrain.failures.stacks import compare, grouped, place, stack
from dtrain.runs.events import StacksReported
from dtrain.runs.log_store import Stream, tail
from dtrain.session.watching.watched import WatchedHost, WatchedJob

STDERR_TAIL = 1 << 16
"""Bytes at the end of a worker's stderr that are searched for its stack."""
STACKS_SECONDS = 40.0
"""Seconds that hosts may take to report the stacks of their workers."""
RAS_HOSTS = 2
"""Hosts that query NCCL, whose answer is about all hosts. The second one helps if the first is
broken."""
APART = (
    "ranks wait in different places: most often for those that are in no collective; if all are in"
    " one, each rank must call the same collectives in the same order"
)
"""Of ranks that hang, if it is not known which collective some have not joined."""


class Whereabouts:
    """Only the attempt's thread calls it."""

    def __init__(self, job: WatchedJob, hosts: Mapping[str, WatchedHost]) -> None:
        self._job = job
        self._hosts = hosts
        self._requested_at = 0.0

    def request(self, now: float, *, abort: bool) -> None:
        """Have the hosts report stacks. ``abort``: they may kill workers to get them."""
        self._requested_at = now
        for number, host in enumerate(self._hosts.values()):
            host.request_stacks(abort=abort, ras=number < RAS_HOSTS)

    def are_known(self, now: float) -> bool:
        """Whether the hosts that can have answered the request, or have taken too long."""
        return now >= self._requested_at + STACKS_SECONDS or all(
            host.evidence.stacks_complete or host.reported_end or not host.reachable
            for host in self._hosts.values()
        )

    def report(self) -> StacksReported:
        """What the hosts have answered."""
        silent = [
            name
            for name, host in self._hosts.items()
            if not host.evidence.stacks_complete and not host.reported_end
        ]
        no_answer = [f"no answer from {hostlist.brief(silent)}"] if silent else []
        groups = grouped(self._stacks())
        notes = self._differences() + self._unread() + no_answer
        return StacksReported(groups, tuple(notes))

    def describe(self) -> list[str]:
        """Where workers that hang wait: one line for each place."""
        streams = self.running()
        # The ranks of a torchrun may have no streams of their own.
        texts = self._stacks()
        with_ranks = {stream.host for stream in streams if stream.rank is not None}
        with_ranks |= {host for label, host in texts if label.isdecimal()}
        for stream in streams:
            if stream.role == "torchrun" and stream.host in with_ranks:
                continue  # torchrun only waits for its ranks.
            if (stream.label, stream.host) not in texts:
                written = tail(stream.path, STDERR_TAIL).decode(errors="replace")
                texts[stream.label, stream.host] = written
        places = {who: place(stack(text)) for who, text in texts.items()}
        if not any(where.script or where.call for where in places.values()):
            unknown = "no worker reported a stack; install py-spy on the hosts to see stacks"
            return self._differences() or self._unread() or [unknown]
        groups = compare(places)
        stacks = [f"{workers_on(those)}: in {where}" for where, those in groups]
        differences = self._differences()
        if len(groups) > 1 and not differences and all(one.isdecimal() for one, _ in places):
            differences = [APART]
        return stacks + differences

    def running(self) -> list[Stream]:
        """The stderr of each worker that has not finished."""
        sizes = self._job.folder.sizes(self._job.plan)
        # A user may have copied a host's folder.
        streams = [one for one in sizes if one.fd == "stderr" and one.host in self._hosts]
        finished = {host: watched.evidence.finished for host, watched in self._hosts.items()}
        # With a torchrun, its ranks have ended, too.
        ended = {
            stream.host
            for stream in streams
            if stream.role == "torchrun" and stream.label in finished[stream.host]
        }
        return [
            stream
            for stream in streams
            if stream.host not in ended and stream.label not in finished[stream.host]
        ]

    def collective_mismatches(self) -> list[str]:
        """The collectives that some ranks have not joined, from torch's flight recorders."""
        return collectives.compare(
            {
                rank: groups
                for host in self._hosts.values()
                for rank, groups in host.evidence.collectives.copy().items()
            }
        )

    def _stacks(self) -> dict[tuple[str, str], str]:
        """What py-spy shows of each worker that has not finished, by its label and its host."""
        return {
            (label, host): text
            for host, watched in self._hosts.items()
            for label, text in watched.evidence.stacks.copy().items()
            if text and label not in watched.evidence.finished
        }

    def _unread(self) -> list[str]:
        """The workers without a stack, and why they have none."""
        found: dict[str, list[tuple[str, str]]] = {}
        for host, watched in self._hosts.items():
            for label, problem in watched.evidence.unread.copy().items():
                if label not in watched.evidence.finished:
                    found.setdefault(problem, []).append((label, host))
        return [f"no stack of {workers_on(those)}: {problem}" for problem, those in found.items()]

    def _differences(self) -> list[str]:
        reports = [host.evidence.ras for host in self._hosts.values()]
        found = [line for text in reports for line in nccl_ras.explain(text)]
        return self.collective_mismatches() + list(dict.fromkeys(found))
