"""Watches the workers of one attempt: slow ranks, stalls, hangs, and where workers wait."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from enum import Enum, auto

from dtrain.failures.cause import workers_on
from dtrain.failures.stalls import Stall
from dtrain.failures.stragglers import Straggler
from dtrain.failures.traceback import headline, last_words
from dtrain.runs import events
from dtrain.runs.log_store import changed_since, tail
from dtrain.session.watching import stack_requests
from dtrain.session.watching.watched import WatchedHost, WatchedJob
from dtrain.session.watching.whereabouts import Whereabouts

STDERR_TAIL = 1 << 16
"""Bytes at the end of a worker's stderr that are searched for an exception."""
LONG_SILENCE = 600.0
"""Seconds without a sign of life after which a job without a watchdog gets a notice."""
CONNECT_SECONDS = 15.0
"""Seconds in which a process that takes charge connects to the hosts before it asks them for the
stacks that a user wants."""
BETWEEN = 1.0
"""Seconds between two comparisons of all ranks."""
RAISED_SECONDS = 20.0
"""Seconds without a sign of life after which workers with an exception are named. A Python that
ends may wait for its other threads, or in a barrier for all ranks: JAX for 300 s."""
MAX_HEADLINE = 300
"""Characters of an exception in a notice."""
MAX_AFTER = 5
"""Lines that a worker may write after the exception with which it ends."""
GOES_ON_SECONDS = 60.0
"""Seconds. A job that still shows signs of life so long after the last line of a worker does not
wait for it: the worker has caught its exception."""
MAX_RAISED = 3
"""Different exceptions that are shown at once."""
TRACEBACK = b"Traceback (most recent call last):"
REST_SECONDS = 60.0
"""Seconds after the last end of a worker until a notice names those that still run: usually all end
together."""


class Silence(Enum):
    """What the watchdog knows about the job."""

    NONE = auto()
    """The job has reported something recently, or the connections are down."""
    COLLECTING = auto()
    """The hosts collect the stacks of their workers."""
    HUNG = auto()
    """The job must end."""


class WorkerWatch:
    """Only the attempt's thread calls it."""

    def __init__(
        self, job: WatchedJob, hosts: Mapping[str, WatchedHost], longest_pause: float
    ) -> None:
        """``longest_pause``: seconds between two calls of `look`. If more have passed, this
        process stood still (Ctrl-Z, a suspended machine): it has not read what arrived, so the
        excess says nothing about the job."""
        self._job = job
        self._longest_pause = longest_pause
        self._looked = math.inf
        self._hosts = hosts
        self.where = Whereabouts(job, hosts)
        self._watchdog = job.plan.job.watchdog
        self._silence = Silence.NONE
        self._since = math.inf
        self._advised = False
        self._stall: Stall | None = None
        self._locating = False
        """Whether the hosts collect stacks because of the stall, of workers that still run, or of a
        request."""
        self._asked = False
        """Whether they do so because of a request."""
        self._connected_by = math.inf
        self._finished = 0
        """Number of workers that have finished."""
        self._name_rest_at = math.inf
        self._raised: set[tuple[str, str]] = set()
        """Workers that were named because of an exception."""
        self._raised_since = math.inf
        """The beginning of the silence in which exceptions were searched last."""
        self._slow: Straggler | None = None
        self._compare_at = 0.0

    def start(self) -> None:
        """Start the watchdog: the workers run."""
        self._since = self._looked = time.monotonic()
        self._connected_by = self._looked + CONNECT_SECONDS

    def look(self) -> bool:
        """Show what has changed. Returns whether the running job has hung, and must end."""
        now = time.monotonic()
        excess = max(0.0, now - self._looked - self._longest_pause)
        self._looked = now
        self._show_stragglers(now)
        self._answer_request(now)
        self._show_stall(now, excess)
        self._show_rest(now, excess)
        return self._has_hung(now, excess)

    @property
    def _connected(self) -> bool:
        """Whether reports of all workers that may still run arrive."""
        return all(host.reachable or host.reported_end for host in self._hosts.values())

    @property
    def why(self) -> str:
        """The hang for which the job ends, once it is detected; empty before."""
        ends = self._silence is not Silence.NONE and self._watchdog.then != "report"
        return self._detected if ends else ""

    @property
    def _detected(self) -> str:
        return f"no output and no progress from any worker for {self._watchdog.silence:g} s"

    def whereabouts(self) -> list[str]:
        """Which ranks stand still, as far as is known, and where workers wait."""
        standing = [str(self._stall)] if self._stall and self._stall.processes else []
        return standing + self.where.describe()

    def _answer_request(self, now: float) -> None:
        """Answer another process that wants to know where the workers are."""
        if self._asked:
            if self.where.are_known(now):
                self._asked = self._locating = False
                self._job.recorder.record(self.where.report())
        # An answer to another request would count for this one, and may be old.
        elif not self._locating and self._silence is Silence.NONE:
            connected = self._connected or now >= self._connected_by
            self._asked = connected and stack_requests.take(self._job.folder)
            if self._asked:
                self._locate(now)

    def _show_stragglers(self, now: float) -> None:
        """Show which ranks are slow, when that changes."""
        if now < self._compare_at:
            return
        self._compare_at = now + BETWEEN
        found, shown = self._job.steps.stragglers(now), self._slow
        if found.is_news_after(shown) if found is not None else shown is not None:
            self._slow = found
            self._job.recorder.record(events.StragglersChanged(found))

    def _show_stall(self, now: float, excess: float) -> None:
        """Show which ranks stand still, and where, when that changes. A stall does not end the job:
        its workers may still write output."""
        if missed := excess if self._connected else math.inf:
            self._job.steps.pause(now, missed)
        if self._locating and not self._asked and self.where.are_known(now):
            self._locating = False
            for line in self.where.describe():
                self._job.recorder.notice(line)
        elif missed != math.inf and not self._locating and self._silence is Silence.NONE:
            found = self._job.steps.stall(now)
            if (found and found.essence) != (self._stall and self._stall.essence):
                self._change_stall(found, now)

    def _change_stall(self, found: Stall | None, now: float) -> None:
        self._stall = found
        self._job.recorder.record(events.StallChanged(found))
        if found is None:
            return
        self._locate(now)

    def _locate(self, now: float) -> None:
        self._locating = True
        self.where.request(now, abort=False)

    def _show_rest(self, now: float, excess: float) -> None:
        """Name the workers that still run although others have finished long ago: they may wait for
        these forever."""
        count = sum(len(host.evidence.finished) for host in self._hosts.values())
        self._name_rest_at += excess
        if count != self._finished:
            self._finished, self._name_rest_at = count, now + REST_SECONDS
        elif self._locating or self._silence is not Silence.NONE:
            return
        elif now >= self._name_rest_at and self._connected:
            self._name_rest_at = math.inf
            job = self._job.plan.job
            if job.framework == "none" or job.success_policy == "first_host":
                return  # its processes may be independent
            rest = [
                (process.label, part.host.name)
                for part in self._job.plan.hosts
                for process in part.processes
                if process.role != "evaluator"
                and not process.service
                and process.label not in self._hosts[part.host.name].evidence.finished
            ]
            if rest:
                run = "runs" if len(rest) == 1 else "run"
                have = "another one has" if count == 1 else f"{count} others have"
                self._job.recorder.notice(
                    f"{workers_on(rest)} still {run}, {REST_SECONDS:g} s after {have} finished; "
                    "collecting stacks"
                )
                self._locate(now)

    def _has_hung(self, now: float, excess: float) -> bool:
        """Whether the running job has been silent for so long that it must end.

        First, every host gets some seconds to collect the stacks of its workers.
        """
        silence = self._watchdog.silence
        if silence is None and self._advised:
            return False
        if not self._connected:
            # The connection is down, so the silence says nothing about the job.
            self._since, self._silence = now, Silence.NONE
        elif self._silence is Silence.NONE:
            last = (host.evidence.last_activity for host in self._hosts.values())
            self._since = min(now, max(self._since, *last) + excess)
            self._show_raised(now)
            if silence is None:
                self._advise(now)
            # An answer to another request would count for this one, and have less.
            elif now >= self._since + silence and not self._locating:
                self._request_stacks(now)
        elif self._silence is Silence.COLLECTING and self.where.are_known(now):
            if self._watchdog.then == "report":
                for line in self.where.describe():
                    self._job.recorder.notice(line)
                self._since, self._silence = now, Silence.NONE
            else:
                self._silence = Silence.HUNG
        return self._silence is Silence.HUNG

    def _show_raised(self, now: float) -> None:
        """Name the workers that wrote an exception and still run, once the job is silent."""
        if now < self._since + RAISED_SECONDS or self._since == self._raised_since:
            return
        self._raised_since = self._since
        ends_after = time.time() - (now - self._since) - GOES_ON_SECONDS
        found: dict[str, list[tuple[str, str]]] = {}
        for stream in self.where.running():
            who = stream.label, stream.host
            if who in self._raised or not changed_since(stream.path, ends_after):
                continue
            written = tail(stream.path, STDERR_TAIL)
            if TRACEBACK not in written:
                continue  # a parse takes milliseconds, and there may be thousands of workers
            if words := last_words(written, stale_after=MAX_AFTER, plain_lines=0):
                found.setdefault(headline(words)[:MAX_HEADLINE], []).append(who)
                self._raised.add(who)
        most_first = sorted(found.items(), key=lambda group: -len(group[1]))
        for message, those in most_first[:MAX_RAISED]:
            them, has = ("it", "has") if len(those) == 1 else ("they", "have")
            self._job.recorder.notice(
                f"{workers_on(those)} raised an exception and {has} not ended: {message};"
                f" {them} may wait for the others"
            )
        if rest := [who for _, those in most_first[MAX_RAISED:] for who in those]:
            has = "has" if len(rest) == 1 else "have"
            self._job.recorder.notice(
                f"{workers_on(rest)} raised other exceptions and {has} not ended"
            )

    def _advise(self, now: float) -> None:
        """Tell the user of a job without a watchdog, once, that it may hang."""
        if now >= self._since + LONG_SILENCE:
            self._advised = True
            self._job.recorder.notice(
                f"no output and no progress from any worker for {LONG_SILENCE / 60:g} minutes;"
                f" `dtrain stacks {self._job.folder.name}` shows where each rank is, and"
                " 'watchdog: {silence: 10m}' in job would end a job that hangs"
            )

    def _request_stacks(self, now: float) -> None:
        self._silence = Silence.COLLECTING
        ends = self._watchdog.then != "report"
        self._job.recorder.record(events.HangDetected(now - self._since, ends))
        self._job.recorder.notice(f"{self._detected}; collecting stacks")
        self.where.request(now, abort=ends)

    def finished(self) -> list[tuple[str, str, float]]:
        """The workers that exited with status 0, as `ended_early` gets them."""
        return [
            (label, host, then)
            for host, watched in self._hosts.items()
            for label, then in watched.evidence.finished.copy().items()
        ]
