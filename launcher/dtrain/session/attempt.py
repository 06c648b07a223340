"""One try at a job: from its plan, through its hosts, to its report.

`dtrain.session.machine` decides, and a `Link` for each host acts. The attempt passes events from
the links to the machine and actions from the machine to the links, and composes the report.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from dtrain import hostlist
from dtrain.checks import Finding
from dtrain.diagnostics import (
    ConnectError,
    DtrainError,
    ExitCode,
    InternalError,
    NodeError,
    PortBusyError,
    PrepareError,
)
from dtrain.failures import collectives
from dtrain.failures.cause import Failure, Report, alike, in_order_of_blame
from dtrain.failures.kernel import RECENT, KernelMessage, concerning
from dtrain.failures.stacks import compare, place, stack
from dtrain.failures.traceback import last_words
from dtrain.launchplan.plan import HostPlan, LaunchPlan
from dtrain.runs import journal, restart
from dtrain.runs.journal import Journal
from dtrain.runs.log_store import StorageError, tail
from dtrain.session import machine
from dtrain.session.link import Link, Post, Run, close
from dtrain.session.machine import AttemptPhase, HostCondition, Outcome
from dtrain.session.observer import Nobody

STDERR_TAIL = 1 << 16
SIGNAL_POLL = 0.2
BETWEEN_NOTES = 10.0
"""Seconds from one note of how much output has come to the next."""
DRAIN_POLL = 0.2
TO_TELL = 40.0
"""Seconds that hosts have at most to tell where their workers are."""
PATIENCE = 30.0
"""Seconds until somebody is told which hosts keep the launch waiting."""

_EXIT_CODES = {
    Outcome.DONE: ExitCode.OK,
    Outcome.WORKER_FAILED: ExitCode.JOB_FAILED,
    Outcome.HOST_FAILED: ExitCode.NODE_FAILED,
    Outcome.INTERRUPTED: ExitCode.INTERRUPTED,
}


class Attempt:
    """Starts a plan and follows it, or takes up one that was started before."""

    def __init__(
        self, run: Run, posts: queue.SimpleQueue[Post], on_running: Callable[[], None]
    ) -> None:
        """``posts`` is where ``run.post`` leads."""
        self._on_running = on_running
        self._left = False
        self.problems: list[DtrainError] = []
        self._failures: list[Failure] = []
        self._run = run
        self._posts = posts
        self._links = {part.host.name: Link(run, part) for part in run.plan.hosts}
        awaited, services = _workers(run.plan)
        self._state = machine.begin(list(self._links), awaited, services, grace=run.plan.job.grace)
        self._alarm: float | None = None
        self._ran = False
        self._why = ""
        self._note_at = 0.0
        self._noted: dict[str, int] = {}
        self._patient_until = time.monotonic() + PATIENCE
        self._watched_from = math.inf
        self._running_from = math.inf
        self._asked_at: float | None = None
        self._hang = ""
        """What the watchdog saw, once it has acted."""

    def interrupt(self, why: str) -> None:
        self._why = why
        self._posts.put(Post(machine.Interrupted()))

    def leave(self) -> None:
        self._left = True
        self._posts.put(Post(None))

    @property
    def goes_on(self) -> bool:
        """Whether it was left while it ran."""
        return self._left and self._ran and self._state.phase is not AttemptPhase.ENDED

    @property
    def only_ports_are_busy(self) -> bool:
        """Whether the launch would have begun, had another process not taken its port."""
        return bool(self.problems) and all(
            isinstance(problem, PortBusyError) for problem in self.problems
        )

    def run(self) -> Report:
        for link in self._links.values():
            link.begin()
        return self._until_the_end()

    def take_up(self, offsets: Mapping[str, Mapping[str, int]], age: float) -> Report:
        """Follow a run that was started before, ``age`` seconds ago. ``offsets`` says, for each
        host, how much of each stream is here."""
        awaited, services = _workers(self._run.plan)
        grace = self._run.plan.job.grace
        self._state = machine.attached(list(self._links), awaited, services, grace=grace)
        self._ran = True
        self._watched_from = time.monotonic()
        self._running_from = self._watched_from - age
        for host, link in self._links.items():
            link.attach(offsets[host])
        return self._until_the_end()

    def _until_the_end(self) -> Report:
        try:
            while self._state.phase is not AttemptPhase.ENDED and not self._left:
                self._handle(self._next())
            if not self._left:
                self._drain()
                for host, now in self._state.hosts.items():
                    self._links[host].settle(lost=now is HostCondition.LOST)
            self._note_at = 0.0
            self._note_sizes()
        except BaseException:
            for link in self._links.values():
                link.kill()
            raise
        finally:
            if self._run.inspection is not None:
                self._run.inspection.close()
            close(self._links.values())
        return self._report()

    def _tell_of_sync(self) -> None:
        results = [link.synced for link in self._links.values() if link.synced is not None]
        files, sent = max(((r.sent_files, r.sent_bytes) for r in results), default=(0, 0))
        if files:
            size = f"{sent / 1e6:.1f} MB" if sent >= 1e5 else f"{sent / 1e3:.1f} kB"
            same = max(result.unchanged_files for result in results)
            self._run.notice(
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
            self._tell_of_waiting()
            self._note_sizes()
            if self._has_hung():
                return Post(machine.Hung())

    def _has_hung(self) -> bool:
        """Whether the job has been silent for so long that it is to end.

        First every host is asked where its workers are, and has a few seconds to find out.
        """
        watchdog = self._run.plan.job.watchdog
        if watchdog.silence is None or self._state.phase is not AttemptPhase.RUNNING:
            return False
        now = time.monotonic()
        if not all(link.reachable for link in self._links.values()):
            # It is the network that is silent.
            self._watched_from, self._asked_at = now, None
            return False
        if self._asked_at is None:
            heard = max(self._watched_from, *(link.heard for link in self._links.values()))
            if now >= heard + watchdog.silence:
                self._asked_at = now
                self._hang = f"no output and no progress from any worker for {watchdog.silence:g} s"
                self._run.notice(f"{self._hang}; asking each where it is")
                for link in self._links.values():
                    link.tell_stacks(abort=watchdog.then != "report")
            return False
        told = all(link.told or link.over for link in self._links.values())
        if not told and now < self._asked_at + TO_TELL:
            return False
        if watchdog.then == "report":
            for line in self._where():
                self._run.notice(line)
            self._asked_at, self._watched_from, self._hang = None, now, ""
            return False
        return True

    def _where(self) -> list[str]:
        """Who waits where, a line for each place."""
        streams = [
            stream for stream in self._run.folder.sizes(self._run.plan) if stream.fd == "stderr"
        ]
        with_ranks = {stream.host for stream in streams if stream.rank is not None}
        places = {}
        for stream in streams:
            told = self._links[stream.host].stacks.get(stream.label)
            if not told and stream.role == "torchrun" and stream.host in with_ranks:
                continue  # It only looks after its ranks.
            said = told or tail(stream.path, STDERR_TAIL).decode(errors="replace")
            places[stream.label, stream.host] = place(stack(said))
        if not any(where.script or where.call for where in places.values()):
            unknown = "no worker told where it is; py-spy on the hosts can tell of any"
            return self._out_of_step() or [unknown]
        labels = {f"{label} {host}": where for (label, host), where in places.items()}
        stacks = [f"{_people(those)}: in {where}" for where, those in compare(labels)]
        return stacks + self._out_of_step()

    def _out_of_step(self) -> list[str]:
        """Which collectives not all ranks have joined, as torch's flight recorders tell."""
        return collectives.compare(
            {
                rank: groups
                for link in self._links.values()
                for rank, groups in link.collectives.copy().items()
            }
        )

    def _note_sizes(self) -> None:
        """Journal how far all streams are, now and then: output itself bears no time."""
        if time.monotonic() < self._note_at:
            return
        self._note_at = time.monotonic() + BETWEEN_NOTES
        logs = self._run.folder.logs.name
        sizes = {
            f"{logs}/{host}/{name}": size
            for host, link in self._links.items()
            for name, size in link.received().items()
        }
        new = {name: size for name, size in sizes.items() if size != self._noted.get(name)}
        if new:
            self._noted = sizes
            self._run.journal.write(time.time(), journal.Sizes(new))

    def _handle(self, post: Post) -> None:
        before = self._state.outcome
        if post.problem is not None:
            self.problems.append(post.problem)
        if not self._hang:
            # What a worker dies of that was asked where it hangs is no cause.
            self._failures += post.failures
        if post.event is None:
            return
        if isinstance(post.event, machine.Interrupted):
            self._tell_of_interrupt()
        self._state, actions = machine.step(self._state, post.event)
        if before is None and self._state.outcome is Outcome.HOST_FAILED:
            self._explain(post)
        if before is None and self._state.outcome is Outcome.WORKER_FAILED and not self._hang:
            self._run.notice(f"{self._first_failure()}; stopping the others")
        begins = not self._ran and self._state.phase is AttemptPhase.RUNNING
        if begins:
            self._ran = True
            self._watched_from = self._running_from = time.monotonic()
            self._tell_of_sync()
        for action in actions:
            self._act(action)
        if begins:
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
                self._links[host].stop(grace, self._reason(in_order_of_blame(self._failures)))
            case machine.KillHost(host):
                self._links[host].kill()
            case machine.SetAlarm(seconds):
                self._alarm = time.monotonic() + seconds

    def _tell_of_interrupt(self) -> None:
        notice = self._run.notice
        grace = self._state.grace
        match self._state.phase:
            case AttemptPhase.PREPARING | AttemptPhase.GIVING_UP:
                notice(f"{self._why}: stopping before anything was started")
            case AttemptPhase.RUNNING:
                self._run.journal.write(time.time(), journal.Stopping(self._why))
                notice(
                    f"{self._why}: stopping; workers get TERM, and KILL after {grace:g} s"
                    " (Ctrl-C again: now)"
                )
            case AttemptPhase.STOPPING:
                notice("killing what is left; Ctrl-C again gives up on hosts that do not answer")
            case AttemptPhase.KILLING:
                notice("giving up on hosts that do not answer")

    def _tell_of_waiting(self) -> None:
        """Name the hosts that keep everybody waiting, once."""
        if self._state.phase is AttemptPhase.PREPARING and time.monotonic() > self._patient_until:
            self._patient_until = math.inf
            late = [
                host for host, now in self._state.hosts.items() if now is HostCondition.PREPARING
            ]
            inspection = self._run.inspection
            if inspection is not None and inspection.late:
                late = [host for host in late if host in inspection.late]
            self._run.notice(f"still waiting for {hostlist.fold(late)} to be ready")

    def _drain(self) -> None:
        """Wait for what hosts have written and we have not read; a person may cut it short."""
        for link in self._links.values():
            if self._state.hosts[link.host] is HostCondition.LOST:
                continue
            while not link.drained(DRAIN_POLL):
                if self._hear_the_rest():
                    self._run.notice("the rest of the logs stays on the hosts")
                    return
        self._hear_the_rest()

    def _hear_the_rest(self) -> bool:
        """Take in problems that are told after the end; whether somebody will wait no longer."""
        impatient = self._left
        with contextlib.suppress(queue.Empty):
            while True:
                post = self._posts.get_nowait()
                impatient |= isinstance(post.event, machine.Interrupted)
                if post.problem is not None:
                    self.problems.append(post.problem)
        return impatient

    @property
    def has_failed(self) -> bool:
        """Whether it ended in a way that another attempt could mend."""
        full = any(isinstance(problem, StorageError) for problem in self.problems)
        return not full and self._state.outcome in (Outcome.WORKER_FAILED, Outcome.HOST_FAILED)

    @property
    def is_unknown(self) -> bool:
        """Whether no host of a run that was taken up knows of it: nothing had been started, or
        all of them were emptied."""
        return all(link.gone for link in self._links.values())

    def ending(self) -> restart.Attempt:
        """How it ended, for whoever decides whether there is another attempt."""
        failures = self._in_order_of_blame()
        unreachable = {p.host for p in self.problems if isinstance(p, ConnectError)}
        lost = {host for host, now in self._state.hosts.items() if now is HostCondition.LOST}
        faulty = {failure.host for failure in failures[:1] if failure.host_at_fault}
        faulty.update(host for host, _ in self._broken_hosts())
        if self._run.attempt > 1 and self._run.inspection is not None:
            # A spare that will not do; another may.
            faulty |= self._run.inspection.blamed
        steps = [link.step for link in self._links.values() if link.step is not None]
        return restart.Attempt(
            ran=self._ran,
            final=self._is_final,
            step=max(steps, default=None),
            culprit=failures[0].host if failures else None,
            lost=frozenset(lost | unreachable | faulty),
            seconds=max(0.0, time.monotonic() - self._running_from) if self._ran else 0.0,
        )

    @property
    def _is_final(self) -> bool:
        """Whether another attempt is out of the question, whatever the policy."""
        if self._hang:
            return self._run.plan.job.watchdog.then == "stop"
        # What a check of a whole new job finds is for a person to correct.
        return self._run.attempt == 1 and bool(self._refused_by_check)

    def stray(self) -> list[HostPlan]:
        """Hosts that may still run some of it."""
        lost = {host for host, now in self._state.hosts.items() if now is HostCondition.LOST}
        return [
            part
            for part in self._run.plan.hosts
            if part.host.name in lost and not self._links[part.host.name].clean
        ]

    def straggler(self, part: HostPlan) -> Link:
        """A new link to a host, that does nothing but try to end what it has of this attempt.

        It tells nobody: the host may well have a part in the next attempt.
        """
        return straggler(self._run, part)

    # The report --------------------------------------------------------------------------------

    def _report(self) -> Report:
        if self._left:
            return Report(ExitCode.INTERRUPTED, "left")
        outcome = self._state.outcome or Outcome.DONE
        failures = self._in_order_of_blame()
        if outcome is Outcome.DONE:
            # Services that were stopped at the end have not failed.
            failures = ()
        lost = [host for host, now in self._state.hosts.items() if now is HostCondition.LOST]
        told = alike(self.problems, [part.host for part in self._run.plan.hosts])
        problems = [message for message, _ in told]
        explained = {error.host for error in self.problems if isinstance(error, NodeError)}
        unexplained = [host for host in lost if host not in explained]
        if unexplained:
            problems.append(
                f"{hostlist.fold(unexplained)}: did not say that the job's processes are gone"
            )
        hints = [hint for _, hint in told if hint]
        hints += [failure.hint for failure in failures[:1] if failure.hint]
        if outcome in (Outcome.WORKER_FAILED, Outcome.HOST_FAILED):
            for host, message in self._broken_hosts():
                if not failures or failures[0].kernel != message:
                    problems.append(f"{host}: {message.what}")
                    hints.append(message.remedy)
        if self._refused_by_check:
            hints.append("correct what was found; `dtrain launch --no-check` skips this check")
        if self._hang and outcome is Outcome.WORKER_FAILED:
            problems += self._where()
        elif failures and failures[0].is_echo:
            problems += self._out_of_step()
        exit_code = _EXIT_CODES[outcome]
        if outcome is Outcome.DONE and problems:
            exit_code = ExitCode.NODE_FAILED
        if any(isinstance(problem, InternalError) for problem in self.problems):
            exit_code = ExitCode.INTERNAL
        return Report(
            exit_code=exit_code,
            reason=self._reason(failures),
            failures=failures,
            problems=tuple(problems),
            hint="\n".join(dict.fromkeys(hints)),
        )

    def _reason(self, failures: tuple[Failure, ...]) -> str:
        match self._state.outcome:
            case Outcome.DONE | None:
                count = self._run.plan.world_size
                return "the worker finished" if count == 1 else f"all {count} workers finished"
            case Outcome.INTERRUPTED:
                return self._why
            case Outcome.WORKER_FAILED if self._hang:
                return self._hang
            case Outcome.WORKER_FAILED if failures:
                return f"{failures[0].who} {failures[0].how}"
            case Outcome.WORKER_FAILED:
                return "a worker was ended from outside dtrain"
            case _ if self._refused_by_check:
                errors = len(self._refused_by_check)
                return f"not started: a check of the hosts found {errors} error{'s' * (errors > 1)}"
            case _:
                if any(isinstance(problem, StorageError) for problem in self.problems):
                    return "this machine cannot keep the run's files"
                hosts = self._failed_hosts()
                if not hosts:
                    return "dtrain failed"
                if self._ran:
                    return f"{hostlist.fold(hosts)} failed"
                are = "is" if len(hosts) == 1 else "are"
                return f"not started: {hostlist.fold(hosts)} {are} not ready"

    def _failed_hosts(self) -> list[str]:
        """The hosts that have a problem, or were lost, in the plan's order."""
        named = {problem.host for problem in self.problems if isinstance(problem, NodeError)}
        lost = {host for host, now in self._state.hosts.items() if now is HostCondition.LOST}
        return [host for host in self._links if host in named] or [
            host for host in self._links if host in lost
        ]

    @property
    def _refused_by_check(self) -> tuple[Finding, ...]:
        return self._run.inspection.errors if self._run.inspection is not None else ()

    def _first_failure(self) -> str:
        failures = self._in_order_of_blame()
        return f"{failures[0].who} {failures[0].how}" if failures else "a worker was ended"

    def _broken_hosts(self) -> list[tuple[str, KernelMessage]]:
        """Hosts whose kernel says that something is broken, each with the first that it said.

        Where a process has failed of itself, what was long before that has had no part in it.
        """
        own = [failure for failure in map(self._explained, self._failures) if not failure.is_echo]
        since = min((failure.time for failure in own), default=0.0) - RECENT
        found: dict[str, KernelMessage] = {}
        for host, link in self._links.items():
            for message in link.kernel:
                if message.host and not message.weak and message.time >= since:
                    found.setdefault(host, message)
        return list(found.items())

    def _in_order_of_blame(self) -> tuple[Failure, ...]:
        """The failures with all that is known of them by now, the first cause first."""
        return in_order_of_blame(
            replace(
                failure,
                kernel=concerning(
                    self._links[failure.host].kernel, failure.pid, failure.words, failure.time
                ),
            )
            for failure in map(self._explained, self._failures)
        )

    def _explained(self, failure: Failure) -> Failure:
        """With the end of what the process wrote to stderr, where it left no error file."""
        if failure.traceback or failure.message:
            return failure
        logs = self._run.folder.logs / failure.host
        names = [f"{failure.role}-{failure.index}.err"]
        if failure.rank is not None:
            names.append(f"rank-{failure.rank}.err")
        for name in names:
            if said := last_words(tail(logs / name, STDERR_TAIL)):
                return replace(failure, traceback=said, message=said.splitlines()[-1])
        return failure


def straggler(run: Run, part: HostPlan) -> Link:
    """A link that does nothing but try to end what a host has of an attempt, and tells nobody."""
    nobody = replace(
        run,
        observer=Nobody(),
        journal=Journal(Path(os.devnull)),
        inspection=None,
        post=lambda post: None,
    )
    link = Link(nobody, part)
    link.linger()
    return link


def _people(who: list[str]) -> str:
    """``rank 3 on gpu01``, ``ranks 0-2,4-7 on gpu[01-02]``, from ``3 gpu01`` and so on."""
    labels, hosts = zip(*(each.split(" ", 1) for each in who), strict=True)
    ranks = sorted(int(label) for label in labels if label.isdecimal())
    names = hostlist.fold(list(dict.fromkeys(hosts)))
    if len(ranks) < len(labels):
        return f"{', '.join(labels)} on {names}"
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} on {names}"


def _workers(plan: LaunchPlan) -> tuple[list[machine.WorkerId], list[machine.WorkerId]]:
    """The processes whose end a run waits for, and its services."""
    awaited: list[machine.WorkerId] = []
    services: list[machine.WorkerId] = []
    for part in plan.hosts:
        for process in part.processes:
            worker = machine.WorkerId(part.host.name, process.role, process.index)
            (services if process.service else awaited).append(worker)
    return awaited, services
