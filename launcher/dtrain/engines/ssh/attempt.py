"""One attempt at a job: prepares the hosts, follows the workers, writes the report.

`dtrain.engines.ssh.machine` decides, and one `Link` per host acts. The attempt passes events from
the links to the machine and actions from the machine to the links, and composes the report.
"""

from __future__ import annotations

import contextlib
import math
import queue
import time
from collections.abc import Callable, Mapping, Sequence

from dtrain import hostlist
from dtrain.diagnostics import DtrainError, NodeError, PortBusyError, PrepareError
from dtrain.engines.ssh import machine
from dtrain.engines.ssh.context import AttemptContext
from dtrain.engines.ssh.ending import Ending
from dtrain.engines.ssh.host_events import Post, Settle, StopWorkers
from dtrain.engines.ssh.host_state import Leftovers
from dtrain.engines.ssh.inbox import Reported
from dtrain.engines.ssh.isolation import Isolation
from dtrain.engines.ssh.link import Link
from dtrain.engines.ssh.machine import AttemptOutcome, AttemptPhase, HostCondition
from dtrain.engines.ssh.many_hosts import prepared_for
from dtrain.engines.ssh.requests import pack
from dtrain.failures.cause import LEFT, Report
from dtrain.launchplan.plan import LaunchPlan
from dtrain.node.waiting import next_item
from dtrain.runs import events, restart
from dtrain.session.relays.relay import close_all
from dtrain.session.stopping.control import Force
from dtrain.session.watching.worker_watch import WorkerWatch
from dtrain.wording import login_waits

SIGNAL_POLL = 0.2
LONGEST_PAUSE = 1.0
"""Seconds between two looks at the running job, also on a busy machine."""
DRAIN_POLL = 0.2
FIRST_CAUSE_SECONDS = 0.5
"""Seconds after the first failure in which other hosts may report an earlier one."""
WAITING_NOTICE_SECONDS = 10.0
"""Seconds after which a notice names the hosts that are not ready yet."""


class Attempt:
    """Launches a plan and follows it, or attaches to a plan that runs already."""

    def __init__(self, context: AttemptContext, on_running: Callable[[], None]) -> None:
        self._on_running = on_running
        self._context = context
        self._posts = context.posts
        self._links = {part.host.name: Link(context, part) for part in context.plan.hosts}
        self._isolation = Isolation(context, self._links)
        self._watch = WorkerWatch(context, self._links, LONGEST_PAUSE)
        self._ending = Ending(context, self._links, self._watch)
        awaited, services = _workers(context.plan)
        grace = context.plan.job.grace
        self._state = machine.begin(list(self._links), awaited, services, grace=grace)
        self._cut_off = False
        """Whether the launcher leaves because it reaches no host."""
        self._alarm: float | None = None
        self._late_notice_at = time.monotonic() + WAITING_NOTICE_SECONDS
        self._running_from = math.inf
        self._failed_since: float | None = None
        """When a worker failed; None before, and again once a notice has named the first cause."""

    def interrupt(self, why: str, force: Force) -> None:
        self._ending.interrupted_by = why
        # The phase decides the rest, because time limits and failures raise the force, too.
        self._posts.put(Post(machine.Interrupted(kill=force is not Force.TERM)))

    def detach(self) -> None:
        self._posts.put(Post(machine.Detached()))

    @property
    def left(self) -> bool:
        """Whether the launcher has left it."""
        return self._state.phase is AttemptPhase.DETACHED

    @property
    def still_running(self) -> bool:
        """Whether the launcher has left it and the job still runs."""
        return self.left and self._state.started and bool(self._state.running)

    @property
    def problems(self) -> list[DtrainError]:
        return self._ending.problems

    @property
    def only_ports_are_busy(self) -> bool:
        """Whether the launch failed only because other processes use its ports."""
        return bool(self.problems) and all(
            isinstance(problem, PortBusyError) for problem in self.problems
        )

    def run(self) -> Report:
        def begin() -> None:
            for link in self._links.values():
                link.launch()
            pack(checked=self._context.inspection is not None)

        return self._follow(begin)

    def attach(
        self,
        offsets: Mapping[str, Mapping[str, int]],
        reported: Mapping[str, Reported],
        age: float,
    ) -> Report:
        """Follow a run that was started ``age`` seconds ago. For each host, ``offsets`` has the
        bytes of each stream that have arrived, and ``reported`` the events."""
        self._state = machine.attached(self._state)
        self._watch.start()
        self._running_from = time.monotonic() - age

        def begin() -> None:
            for host, link in self._links.items():
                link.attach(offsets.get(host, {}), reported.get(host, ()))

        return self._follow(begin)

    def _follow(self, begin: Callable[[], None]) -> Report:
        with prepared_for(len(self._links)):
            self._run_machine(begin)
        if self.left:
            return self._ending.cut_off() if self._cut_off else LEFT
        if warning := self._ending.separate_trainings(self._state):
            self._context.recorder.notice(warning)
        return self._ending.report(self._state)

    def _run_machine(self, begin: Callable[[], None]) -> None:
        """Run the attempt until it has ended or the launcher leaves, and close all links."""
        try:
            begin()
            while self._state.phase not in (AttemptPhase.ENDED, AttemptPhase.DETACHED):
                self._handle(self._next())
            if self._state.phase is AttemptPhase.ENDED:
                self._drain()
                for host, now in self._state.hosts.items():
                    self._links[host].step(Settle(lost=now is HostCondition.LOST))
                self._show_failure(last=True)
        except BaseException:
            for link in self._links.values():
                link.step(machine.KillHost(link.host))
            raise
        finally:
            if self._context.inspection is not None:
                self._context.inspection.close()
            close_all(self._links.values())
            self._context.progress.close()

    def _show_sync(self) -> None:
        results = [link.synced for link in self._links.values() if link.synced is not None]
        most = max(results, key=lambda result: result.sent_files, default=None)
        if most is not None and most.sent_files:
            self._context.recorder.notice(most.summary("each host"))

    def _next(self) -> Post:
        while True:
            left = math.inf if self._alarm is None else self._alarm - time.monotonic()
            # Limited, because a signal that arrives just before the wait does not end it: Python
            # would run the handler, which posts the interrupt, only after the wait.
            with contextlib.suppress(queue.Empty):
                return next_item(self._posts, min(left, SIGNAL_POLL))
            if left <= 0:  # what arrived before, such as an answer, came first
                self._alarm = None
                return Post(machine.Alarm())
            self._show_waiting()
            self._show_failure()
            if self._state.phase is AttemptPhase.RUNNING:
                self._isolation.look(self._state.running)
                self._context.progress.write_due()
                if self._watch.look():
                    return Post(machine.Hung())

    def _handle(self, post: Post) -> None:
        before = self._state
        if post.problem is not None:
            self.problems.append(post.problem)
        if not self._watch.why:
            # Collecting stacks can kill a worker. Its death is not a cause.
            self._ending.failures += post.failures
        if post.event is None:
            return
        if isinstance(post.event, machine.Interrupted):
            self._show_interrupt(kill=post.event.kill)
        self._state, actions = machine.step(self._state, post.event)
        self._cut_off |= self.left and isinstance(post.event, machine.CutOff)
        if before.outcome is None and self._state.outcome is AttemptOutcome.HOST_FAILED:
            self._explain(post)
        failed = before.outcome is None and self._state.outcome is AttemptOutcome.WORKER_FAILED
        if failed and not self._watch.why:
            self._failed_since = time.monotonic()
        if isinstance(post.event, machine.HostLost) and self._state.outcome is None:
            self._links[post.event.host].step(Settle(lost=True))
            notice = f"{post.event.host} is lost; all of its workers had finished"
            self._context.recorder.notice(f"{notice}, so the job continues")
        started = self._state.started and not before.started
        if started:
            self._watch.start()
            self._running_from = time.monotonic()
            self._show_sync()
        self._act(actions)
        if started:
            self._on_running()

    def _explain(self, post: Post) -> None:
        """Name the host that ended the job, unless its link has reported a problem."""
        if isinstance(post.event, machine.HostEnded | machine.HostLost) and post.problem is None:
            host = post.event.host
            if not any(isinstance(one, NodeError) and one.host == host for one in self.problems):
                reason = "the host stopped its workers before they finished"
                self.problems.append(PrepareError(host, "running the job", reason))

    def _act(self, actions: Sequence[machine.AttemptAction]) -> None:
        reason = ""
        for action in actions:
            match action:
                case machine.StartHost(host) | machine.AbortHost(host) | machine.KillHost(host):
                    self._links[host].step(action)
                case machine.StopHost(host, grace):
                    # Once for all hosts, because it reads what the failed processes wrote.
                    reason = reason or self._ending.reason(self._state, self._ending.causes())
                    self._links[host].step(StopWorkers(grace, reason))
                case machine.SetAlarm(seconds):
                    self._alarm = time.monotonic() + seconds

    def _show_interrupt(self, *, kill: bool) -> None:
        notice, why = self._context.recorder.notice, self._ending.interrupted_by
        grace = self._state.grace
        insist = "`dtrain stop --force`"
        again = "Ctrl-C again" if why == "Ctrl-C" else insist
        match self._state.phase:
            case AttemptPhase.PREPARING | AttemptPhase.GIVING_UP:
                number = self._context.plan.attempt
                what = "nothing was" if number == 1 else f"attempt {number} was not"
                notice(f"{why}: stopping; {what} started")
            case AttemptPhase.RUNNING if kill:
                self._context.recorder.record(events.StopRequested(why))
                notice(f"{why}: killing the workers")
            case AttemptPhase.RUNNING:
                self._context.recorder.record(events.StopRequested(why))
                # The live view cuts notices at the width of a terminal, often 80 columns.
                end = f"{why}: stopping with TERM, KILL after {grace:g} s"
                notice(f"{end} ({insist} kills now)", f"{end} ({again} kills now)")
            case AttemptPhase.STOPPING:
                end = "gives up on hosts that do not answer"
                notice(
                    f"killing the workers; {insist} {end}", f"killing the workers; {again} {end}"
                )
            case AttemptPhase.KILLING:
                notice("giving up on hosts that do not answer")

    def _show_failure(self, *, last: bool = False) -> None:
        """Name the first cause once, as the report does.

        The first reported failure may be a consequence of another one. That other failure is
        reported soon after, or while the workers stop.
        """
        if self._failed_since is None:
            return
        causes = self._ending.causes()
        patience = machine.FAILURE_GRACE if not causes or causes[0].is_echo else FIRST_CAUSE_SECONDS
        if last or time.monotonic() >= self._failed_since + patience:
            self._failed_since = None
            what = causes[0].summary if causes else "a worker was stopped"
            alone = sum(len(part.processes) for part in self._context.plan.hosts) == 1
            self._context.recorder.notice(what if alone else f"{what}; stopping the other workers")

    def _show_waiting(self) -> None:
        """Name the hosts that delay the launch, once."""
        if self._state.phase is AttemptPhase.PREPARING and time.monotonic() > self._late_notice_at:
            self._late_notice_at = math.inf
            late = [
                host for host, now in self._state.hosts.items() if now is HostCondition.PREPARING
            ]
            inspection = self._context.inspection
            if inspection is not None and inspection.late:
                late = [host for host in late if host in inspection.late]
            notice = f"still waiting for {hostlist.brief(late)} to be ready"
            if silent := [host for host in late if self._links[host].is_silent]:
                notice += f"; {login_waits(silent[0])}"
            self._context.recorder.notice(notice)

    def _drain(self) -> None:
        """Wait for output that hosts have not sent yet. A second stop request ends the wait."""
        for link in self._links.values():
            lost = self._state.hosts[link.host] is HostCondition.LOST
            if lost and link.state.leftovers is Leftovers.UNKNOWN:
                continue
            while not link.drained(DRAIN_POLL):
                if self._handle_late_posts():
                    self._context.recorder.notice("the rest of the logs stays on the hosts")
                    return
        self._handle_late_posts()

    def _handle_late_posts(self) -> bool:
        """Handle problems that arrive after the end. Returns whether the user asks to leave."""
        asked_to_leave = False
        with contextlib.suppress(queue.Empty):
            while True:
                post = self._posts.get_nowait()
                asked_to_leave |= isinstance(post.event, machine.Interrupted | machine.Detached)
                if isinstance(post.event, machine.Detached):
                    self._state, _ = machine.step(self._state, post.event)
                if post.problem is not None:
                    self.problems.append(post.problem)
        return asked_to_leave

    @property
    def has_failed(self) -> bool:
        """Whether it failed in a way that another attempt could fix."""
        failed = self._state.outcome in (AttemptOutcome.WORKER_FAILED, AttemptOutcome.HOST_FAILED)
        return failed and not self.lacks_output

    @property
    def lacks_output(self) -> bool:
        """Whether this machine could not store all output."""
        return self._ending.lacks_output

    @property
    def is_unknown(self) -> bool:
        """Whether no host knows the run: nothing was started, or all run folders were deleted."""
        return all(link.state.leftovers is Leftovers.NO_RUN for link in self._links.values())

    def result(self) -> restart.AttemptResult:
        """How the attempt ended, for the restart decision."""
        seconds = time.monotonic() - self._running_from if self._state.started else 0.0
        return self._ending.for_restart(self._state, max(0.0, seconds))

    def uncleaned(self) -> list[str]:
        """Hosts that may still run processes of this attempt."""
        return [
            host
            for host, now in self._state.hosts.items()
            if self._links[host].state.is_unclean(lost=now is HostCondition.LOST)
        ]


def _workers(plan: LaunchPlan) -> tuple[list[machine.WorkerId], list[machine.WorkerId]]:
    """The processes that a run waits for, and its services."""
    awaited: list[machine.WorkerId] = []
    services: list[machine.WorkerId] = []
    for part in plan.hosts:
        for process in part.processes:
            worker = machine.WorkerId(part.host.name, process.role, process.index)
            (services if process.service else awaited).append(worker)
    return awaited, services
