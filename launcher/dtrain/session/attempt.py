"""One try at a job: from its plan, through its hosts, to its report.

`dtrain.session.machine` decides, and a `Link` for each host acts. The attempt passes events from
the links to the machine and actions from the machine to the links, and composes the report.
"""

from __future__ import annotations

import contextlib
import math
import queue
import time
from collections.abc import Callable, Mapping

from dtrain import hostlist
from dtrain.diagnostics import DtrainError, ExitCode, NodeError, PortBusyError, PrepareError
from dtrain.failures.cause import Report
from dtrain.launchplan.plan import LaunchPlan
from dtrain.runs import journal, restart
from dtrain.session import machine
from dtrain.session.context import AttemptContext
from dtrain.session.ending import Ending
from dtrain.session.hang_watch import HangWatch
from dtrain.session.host_state import Leftovers, Post
from dtrain.session.link import Link
from dtrain.session.machine import AttemptPhase, HostCondition, Outcome
from dtrain.session.relay import close_all

SIGNAL_POLL = 0.2
BETWEEN_NOTES = 10.0
"""Seconds between two notes in the journal of how much output has arrived."""
DRAIN_POLL = 0.2
SETTLING = 0.5
"""Seconds after the first failure in which other hosts may report an earlier one."""
PATIENCE = 30.0
"""Seconds until a person sees which hosts keep the launch waiting."""


class Attempt:
    """Starts a plan and follows it, or attaches to one that was started before."""

    def __init__(
        self,
        context: AttemptContext,
        posts: queue.SimpleQueue[Post],
        on_running: Callable[[], None],
    ) -> None:
        """``posts`` is where ``context.post`` leads."""
        self._on_running = on_running
        self._context = context
        self._posts = posts
        self._links = {part.host.name: Link(context, part) for part in context.plan.hosts}
        self._hang = HangWatch(context, self._links)
        self._ending = Ending(context, self._links, self._hang)
        awaited, services = _workers(context.plan)
        grace = context.plan.job.grace
        self._state = machine.begin(list(self._links), awaited, services, grace=grace)
        self._alarm: float | None = None
        self._note_at = 0.0
        self._noted: dict[str, int] = {}
        self._patient_until = time.monotonic() + PATIENCE
        self._running_from = math.inf
        self._unnamed_since: float | None = None
        """Since when a worker has failed, until a notice names the first cause."""

    def interrupt(self, why: str) -> None:
        self._ending.interrupted_by = why
        self._posts.put(Post(machine.Interrupted()))

    def detach(self) -> None:
        self._posts.put(Post(machine.Detached()))

    @property
    def goes_on(self) -> bool:
        """Whether the launcher has left while the job ran."""
        state = self._state
        detached = state.phase is AttemptPhase.DETACHED
        return detached and state.started and bool(state.running)

    @property
    def problems(self) -> list[DtrainError]:
        return self._ending.problems

    @property
    def only_ports_are_busy(self) -> bool:
        """Whether the launch would have begun, had another process not taken its port."""
        return bool(self.problems) and all(
            isinstance(problem, PortBusyError) for problem in self.problems
        )

    def run(self) -> Report:
        for link in self._links.values():
            link.launch()
        return self._until_the_end()

    def attach(self, offsets: Mapping[str, Mapping[str, int]], age: float) -> Report:
        """Follow a run that was started before, ``age`` seconds ago. ``offsets`` says, for each
        host, how much of each stream has arrived."""
        awaited, services = _workers(self._context.plan)
        grace = self._context.plan.job.grace
        self._state = machine.attached(list(self._links), awaited, services, grace=grace)
        self._hang.start()
        self._running_from = time.monotonic() - age
        for host, link in self._links.items():
            link.attach(offsets[host])
        return self._until_the_end()

    def _until_the_end(self) -> Report:
        try:
            while self._state.phase not in (AttemptPhase.ENDED, AttemptPhase.DETACHED):
                self._handle(self._next())
            if self._state.phase is AttemptPhase.ENDED:
                self._drain()
                for host, now in self._state.hosts.items():
                    self._links[host].settle(lost=now is HostCondition.LOST)
                self._show_failure(last=True)
            self._note_at = 0.0
            self._note_sizes()
        except BaseException:
            for link in self._links.values():
                link.kill()
            raise
        finally:
            if self._context.inspection is not None:
                self._context.inspection.close()
            close_all(self._links.values())
        if self._state.phase is AttemptPhase.DETACHED:
            return Report(ExitCode.INTERRUPTED, "left")
        if apart := self._ending.apart(self._state):
            self._context.notice(apart)
        return self._ending.report(self._state)

    def _show_sync(self) -> None:
        results = [link.synced for link in self._links.values() if link.synced is not None]
        files, sent = max(((r.sent_files, r.sent_bytes) for r in results), default=(0, 0))
        if files:
            size = f"{sent / 1e6:.1f} MB" if sent >= 1e5 else f"{sent / 1e3:.1f} kB"
            same = max(result.unchanged_files for result in results)
            self._context.notice(
                f"sent {files} files ({size}) to each host"
                + (f"; {same} were there already" if same else "")
            )

    def _next(self) -> Post:
        while True:
            left = math.inf if self._alarm is None else self._alarm - time.monotonic()
            if left <= 0:
                self._alarm = None
                return Post(machine.Alarm())
            # Bounded, because a signal that comes just before the wait does not end it: its
            # handler, which is what posts the interrupt, would run only afterwards.
            with contextlib.suppress(queue.Empty):
                return self._posts.get(timeout=min(left, SIGNAL_POLL))
            self._show_waiting()
            self._show_failure()
            self._note_sizes()
            running = self._state.phase is AttemptPhase.RUNNING
            if running and self._hang.has_hung():
                return Post(machine.Hung())

    def _note_sizes(self) -> None:
        """Journal how far all streams are, now and then: output itself bears no time."""
        if time.monotonic() < self._note_at:
            return
        self._note_at = time.monotonic() + BETWEEN_NOTES
        logs = self._context.folder.logs.name
        sizes = {
            f"{logs}/{host}/{name}": size
            for host, link in self._links.items()
            for name, size in link.received().items()
        }
        new = {name: size for name, size in sizes.items() if size != self._noted.get(name)}
        if new:
            self._noted = sizes
            self._context.journal.write(time.time(), journal.Sizes(new))

    def _handle(self, post: Post) -> None:
        before = self._state
        if post.problem is not None:
            self.problems.append(post.problem)
        if not self._hang.why:
            # A worker that was asked where it hangs may die of that, which is no cause.
            self._ending.failures += post.failures
        if post.event is None:
            return
        if isinstance(post.event, machine.Interrupted):
            self._show_interrupt()
        self._state, actions = machine.step(self._state, post.event)
        if before.outcome is None and self._state.outcome is Outcome.HOST_FAILED:
            self._explain(post)
        failed = before.outcome is None and self._state.outcome is Outcome.WORKER_FAILED
        if failed and not self._hang.why:
            self._unnamed_since = time.monotonic()
        started = self._state.started and not before.started
        if started:
            self._hang.start()
            self._running_from = time.monotonic()
            self._show_sync()
        for action in actions:
            self._act(action)
        if started:
            self._on_running()

    def _explain(self, post: Post) -> None:
        """Say which host ended the job, where its link has not said so."""
        if isinstance(post.event, machine.HostEnded | machine.HostLost) and post.problem is None:
            host = post.event.host
            if not any(isinstance(one, NodeError) and one.host == host for one in self.problems):
                reason = "the host ended its part of the job before its workers had finished"
                self.problems.append(PrepareError(host, "running the job", reason))

    def _act(self, action: machine.Action) -> None:
        match action:
            case machine.StartHost(host):
                self._links[host].start()
            case machine.AbortHost(host):
                self._links[host].abort()
            case machine.StopHost(host, grace):
                reason = self._ending.reason(self._state, self._ending.causes())
                self._links[host].stop(grace, reason)
            case machine.KillHost(host):
                self._links[host].kill()
            case machine.SetAlarm(seconds):
                self._alarm = time.monotonic() + seconds

    def _show_interrupt(self) -> None:
        notice, why = self._context.notice, self._ending.interrupted_by
        grace = self._state.grace
        match self._state.phase:
            case AttemptPhase.PREPARING | AttemptPhase.GIVING_UP:
                notice(f"{why}: stopping before anything was started")
            case AttemptPhase.RUNNING:
                self._context.journal.write(time.time(), journal.Stopping(why))
                notice(
                    f"{why}: stopping; workers get TERM, and KILL after {grace:g} s"
                    " (Ctrl-C again: now)"
                )
            case AttemptPhase.STOPPING:
                notice("killing what is left; Ctrl-C again gives up on hosts that do not answer")
            case AttemptPhase.KILLING:
                notice("giving up on hosts that do not answer")

    def _show_failure(self, *, last: bool = False) -> None:
        """Name the first cause, once, as the report will.

        The first failure that is heard of may be the echo of another, which is then reported
        within moments, or while the workers are stopped.
        """
        if self._unnamed_since is None:
            return
        causes = self._ending.causes()
        patience = machine.FAILURE_GRACE if not causes or causes[0].is_echo else SETTLING
        if last or time.monotonic() >= self._unnamed_since + patience:
            self._unnamed_since = None
            what = f"{causes[0].who} {causes[0].how}" if causes else "a worker was ended"
            self._context.notice(f"{what}; stopping the others")

    def _show_waiting(self) -> None:
        """Name the hosts that keep everybody waiting, once."""
        if self._state.phase is AttemptPhase.PREPARING and time.monotonic() > self._patient_until:
            self._patient_until = math.inf
            late = [
                host for host, now in self._state.hosts.items() if now is HostCondition.PREPARING
            ]
            inspection = self._context.inspection
            if inspection is not None and inspection.late:
                late = [host for host in late if host in inspection.late]
            self._context.notice(f"still waiting for {hostlist.fold(late)} to be ready")

    def _drain(self) -> None:
        """Wait for what hosts have written and we have not read; a person may cut it short."""
        for link in self._links.values():
            if self._state.hosts[link.host] is HostCondition.LOST:
                continue
            while not link.drained(DRAIN_POLL):
                if self._hear_the_rest():
                    self._context.notice("the rest of the logs stays on the hosts")
                    return
        self._hear_the_rest()

    def _hear_the_rest(self) -> bool:
        """Take in problems that come after the end; whether a person will wait no longer."""
        impatient = False
        with contextlib.suppress(queue.Empty):
            while True:
                post = self._posts.get_nowait()
                impatient |= isinstance(post.event, machine.Interrupted | machine.Detached)
                if isinstance(post.event, machine.Detached):
                    self._state, _ = machine.step(self._state, post.event)
                if post.problem is not None:
                    self.problems.append(post.problem)
        return impatient

    @property
    def has_failed(self) -> bool:
        """Whether it ended in a way that another attempt could mend."""
        failed = self._state.outcome in (Outcome.WORKER_FAILED, Outcome.HOST_FAILED)
        return failed and not self._ending.storage_failed

    @property
    def is_unknown(self) -> bool:
        """Whether no host knows the run that was attached to: nothing was started, or all of them
        were emptied."""
        return all(link.leftovers is Leftovers.NO_RUN for link in self._links.values())

    def ending(self) -> restart.AttemptResult:
        """How it ended, for the decision on another attempt."""
        seconds = time.monotonic() - self._running_from if self._state.started else 0.0
        return self._ending.for_restart(self._state, max(0.0, seconds))

    def uncleaned(self) -> list[str]:
        """Hosts that may still run some of it."""
        return [
            host
            for host, now in self._state.hosts.items()
            if now is HostCondition.LOST and self._links[host].leftovers is Leftovers.UNKNOWN
        ]


def _workers(plan: LaunchPlan) -> tuple[list[machine.WorkerId], list[machine.WorkerId]]:
    """The processes whose end a run waits for, and its services."""
    awaited: list[machine.WorkerId] = []
    services: list[machine.WorkerId] = []
    for part in plan.hosts:
        for process in part.processes:
            worker = machine.WorkerId(part.host.name, process.role, process.index)
            (services if process.service else awaited).append(worker)
    return awaited, services
