"""How an attempt ended: its report, and the input to the restart decision."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import field, replace

from dtrain import hostlist
from dtrain.checks import Finding
from dtrain.checks.finding import refusal
from dtrain.diagnostics import (
    AuthError,
    ConnectError,
    DtrainError,
    ExitCode,
    InternalError,
    NodeError,
)
from dtrain.engines.ssh.context import AttemptContext
from dtrain.engines.ssh.host_state import Leftovers
from dtrain.engines.ssh.link import Link
from dtrain.engines.ssh.machine import AttemptOutcome, AttemptState, HostCondition
from dtrain.failures import alike
from dtrain.failures.cause import Failure, Report, all_finished, ended_early, in_order_of_blame
from dtrain.failures.kernel import RECENT, KernelMessage, concerning
from dtrain.records import dataclass
from dtrain.runs import restart
from dtrain.runs.storage import CANNOT_STORE, StorageError
from dtrain.session.watching.failure_output import explained
from dtrain.session.watching.worker_watch import WorkerWatch

_EXIT_CODES = {
    AttemptOutcome.DONE: ExitCode.OK,
    AttemptOutcome.WORKER_FAILED: ExitCode.JOB_FAILED,
    AttemptOutcome.HOST_FAILED: ExitCode.NODE_FAILED,
    AttemptOutcome.INTERRUPTED: ExitCode.INTERRUPTED,
}

_EXIT_SECONDS = 10.0
"""Seconds between an exception and the failure of a peer that noticed it."""


@dataclass(slots=True)
class Ending:
    """What is known so far about why an attempt ends."""

    context: AttemptContext
    links: Mapping[str, Link]
    watch: WorkerWatch
    problems: list[DtrainError] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    interrupted_by: str = ""
    """Source of the stop request, such as ``Ctrl-C``."""

    def report(self, state: AttemptState) -> Report:
        outcome = state.outcome or AttemptOutcome.DONE
        # Services that were stopped at the end did not fail.
        failures = () if outcome is AttemptOutcome.DONE else self.causes()
        plan_hosts = [part.host for part in self.context.plan.hosts]
        problems = alike.messages(self.problems, plan_hosts)
        problems += self._unconfirmed(state, outcome)
        hints = alike.hints(self._with_remedy(state), plan_hosts)
        early, why_early = ended_early(failures, self.watch.finished())
        hints += [why_early] if early else [one.hint for one in failures[:1] if one.hint]
        if outcome in (AttemptOutcome.WORKER_FAILED, AttemptOutcome.HOST_FAILED):
            for host, message in self._broken_hosts():
                if not failures or failures[0].kernel != message:
                    problems.append(f"{host}: {message.what}")
                    hints.append(message.remedy)
        failed = outcome is AttemptOutcome.HOST_FAILED
        if failed and any(self.links[host].state.cut_off for host in _lost(state)):
            limit = f"{self.context.plan.job.restart.node_timeout:g} s (job.restart.node_timeout)"
            hints.append(f"a host is lost after {limit}; set more if a restart takes longer there")
        if self._findings:
            hints.append(refusal(len(self._findings))[1])
        if self.watch.why and outcome is AttemptOutcome.WORKER_FAILED:
            problems += self.watch.whereabouts()
        elif failures and failures[0].is_echo:
            problems += self.watch.where.collective_mismatches()
            if early:
                problems.append(early)
        return Report(
            exit_code=self._exit_code(outcome),
            reason=self.reason(state, failures),
            failures=failures,
            problems=tuple(problems),
            hint="\n".join(dict.fromkeys(hints)),
            stragglers=self.context.steps.stragglers(time.monotonic()),
        )

    def cut_off(self) -> Report:
        """The report of a launcher that leaves the job, because it reaches no host."""
        job = self.context.plan.job
        limit = f"{job.restart.node_timeout:g} s (job.restart.node_timeout)"
        problems = [link.overdue for link in self.links.values() if link.overdue is not None]
        why = "this machine may have lost its network"
        if problems and all(one.jump for one in problems):
            why = (
                f"{hostlist.fold(sorted({one.jump for one in problems}))} let no connection through"
            )
        elif any(isinstance(one, AuthError) and one.asked for one in problems):
            why = "a login needs the answer of its user"
        reason = f"no host could be reached for {limit}; {why}"
        if job.on_disconnect == "stop":
            reason += f"; without it, the hosts stop the job after {job.lease:g} s (job.lease)"
        return Report(ExitCode.NODE_FAILED, reason)

    def _unconfirmed(self, state: AttemptState, outcome: AttemptOutcome) -> list[str]:
        """The problem of lost hosts that may still run processes. Of a job that is not done, only
        those that no other problem names."""
        done = outcome is AttemptOutcome.DONE
        reported = {error.host for error in self.problems if isinstance(error, NodeError)}
        hosts = [
            host
            for host in _lost(state)
            if self.links[host].state.leftovers is Leftovers.UNKNOWN
            and (done or host not in reported)
        ]
        output = "; the end of their output may be missing" if done else ""
        text = f"did not confirm that the job's processes ended{output}"
        return [f"{hostlist.brief(hosts)}: {text}"] if hosts else []

    def _exit_code(self, outcome: AttemptOutcome) -> ExitCode:
        if any(isinstance(problem, InternalError) for problem in self.problems):
            return ExitCode.INTERNAL
        if outcome is AttemptOutcome.DONE and not self._result_stands:
            return ExitCode.NODE_FAILED
        return _EXIT_CODES[outcome]

    def separate_trainings(self, state: AttemptState) -> str:
        """A warning if the workers have finished and never connected to each other: each trained
        a model of its own. Empty if that is not certain, or may be intended."""
        plan = self.context.plan
        job = plan.job
        workers = [one for part in plan.hosts for one in part.processes if one.role != "evaluator"]
        if state.outcome is not AttemptOutcome.DONE or job.framework == "none" or len(workers) < 2:
            return ""
        if any(link.evidence.connected is not False for link in self.links.values()):
            return ""
        looked_for = {
            "torch": "MASTER_ADDR, RANK and WORLD_SIZE (torch.distributed.init_process_group)",
            "tensorflow": "TF_CONFIG (a tf.distribute strategy for several workers)",
            "jax": "JAX_COORDINATOR_ADDRESS (jax.distributed.initialize)",
        }[job.framework]
        if job.framework == "torch" and job.per == "host":
            looked_for += ", and a launcher in it the number of hosts (`dtrain help programs`)"
        return (
            f"warning: no worker ever connected to another: {len(workers)} separate programs ran,"
            f" not one training\nhint: look in their output for a reason to end early; else the"
            f" program has to use {looked_for}; if its workers are meant to run separately, set"
            " 'framework: none'"
        )

    def reason(self, state: AttemptState, failures: tuple[Failure, ...]) -> str:
        """One line. ``failures`` starts with the first cause."""
        match state.outcome:
            case AttemptOutcome.DONE | None:
                return all_finished(self.context.plan)
            case AttemptOutcome.INTERRUPTED:
                return self.interrupted_by
            case AttemptOutcome.WORKER_FAILED if self.watch.why:
                return self.watch.why
            case AttemptOutcome.WORKER_FAILED if failures:
                return failures[0].summary
            case AttemptOutcome.WORKER_FAILED:
                if self._stop_reasons:
                    return f"an earlier launcher stopped the job: {self._stop_reasons[0]}"
                if hosts := self._named_hosts:  # the problems say why
                    return f"{hostlist.brief(hosts)} stopped the workers"
                return "something outside dtrain stopped a worker"
            case _ if self._findings:
                return refusal(len(self._findings))[0]
            case _:
                if self.lacks_output:
                    return CANNOT_STORE
                hosts = self._failed_hosts(state)
                if not hosts:
                    return "dtrain failed"
                if state.started:
                    return f"{hostlist.brief(hosts)} failed"
                are = "is" if len(hosts) == 1 else "are"
                return f"not started: {hostlist.brief(hosts)} {are} not ready"

    def for_restart(self, state: AttemptState, seconds: float) -> restart.AttemptResult:
        """``seconds``: how long the workers ran."""
        failures = self.causes()
        unreachable = {
            problem.host
            for problem in self.problems
            if isinstance(problem, ConnectError)
            or (isinstance(problem, AuthError) and problem.host in self.context.proven_hosts)
        }
        faulty = {failure.host for failure in failures[:1] if failure.host_at_fault}
        faulty.update(host for host, _ in self._broken_hosts())
        inspection = self.context.inspection
        if self.context.plan.attempt > 1 and inspection is not None:
            # The check rejected this spare; another spare may pass.
            faulty |= inspection.failing_newcomers
        return restart.AttemptResult(
            ran=state.started,
            why_last=self._why_last(failures),
            step=self.context.progress.step,
            culprit=failures[0].host if failures else None,
            lost=frozenset({*_lost(state), *unreachable, *faulty}),
            seconds=seconds,
        )

    @property
    def _result_stands(self) -> bool:
        """Whether the result of workers that have all finished stays as it is.

        It does if the connection to a host is lost after that, or if a host's supervisor died or
        its run folder is gone, and nothing is left there. It does not if processes survive, or if a
        host answers, but does not confirm that it is clean.
        """
        return all(isinstance(problem, NodeError) for problem in self.problems) and not any(
            link.state.doubtful for link in self.links.values()
        )

    def _with_remedy(self, state: AttemptState) -> list[DtrainError]:
        """The problems whose hints help. The hints about a host that was lost are about its
        workers, which may have finished before."""
        over = {
            host
            for host, link in self.links.items()
            if state.has_finished(host) and not link.state.doubtful
        }
        return [
            problem
            for problem in self.problems
            if not (isinstance(problem, NodeError) and problem.host in over)
        ]

    @property
    def _stop_reasons(self) -> list[str]:
        """Why an earlier launcher stopped the job, as its hosts report it."""
        reasons = (link.state.stop_reason for link in self.links.values())
        return [reason for reason in reasons if reason]

    @property
    def lacks_output(self) -> bool:
        """Whether this machine could not store all output."""
        return any(isinstance(problem, StorageError) for problem in self.problems)

    def _why_last(self, failures: tuple[Failure, ...]) -> str | None:
        """See `restart.AttemptResult.why_last`."""
        if self.watch.why and self.context.plan.job.watchdog.then == "stop":
            return "job.watchdog.then is stop; `then: restart` restarts the job"
        if CANNOT_STORE in self._stop_reasons:
            return ""  # only the rest of the output was still to be fetched
        if self.context.plan.attempt > 1:
            # The job has run before: its user may be changing the script, or a spare is at fault.
            return None
        known = failures[0].explanation if failures else None
        if known is not None and known.lasting and self.context.progress.step is None:
            return f"it would fail again: {known.what}"
        return "" if self._findings else None  # the user must fix what the check finds

    @property
    def _findings(self) -> tuple[Finding, ...]:
        """The errors of the host check that stopped the launch."""
        inspection = self.context.inspection
        return inspection.errors if inspection is not None else ()

    def _failed_hosts(self, state: AttemptState) -> list[str]:
        """The hosts with a problem, or else the lost ones, in the plan's order. Only hosts whose
        workers were needed."""
        named, lost = self._named_hosts, _lost(state)
        needed = [host for host in self.links if not state.has_finished(host)]
        return [host for host in needed if host in named] or [
            host for host in needed if host in lost
        ]

    @property
    def _named_hosts(self) -> list[str]:
        """The hosts with a problem, in the plan's order."""
        named = {problem.host for problem in self.problems if isinstance(problem, NodeError)}
        return [host for host in self.links if host in named]

    def causes(self) -> tuple[Failure, ...]:
        """The failures with all that is known so far, the first cause first."""
        found = in_order_of_blame(map(self._with_kernel, map(self._explained, self.failures)))
        if found and found[0].is_echo:
            return in_order_of_blame([*self._raised_before(found[0].time), *found])
        return found

    def _with_kernel(self, failure: Failure) -> Failure:
        kernel = self.links[failure.host].evidence.kernel
        logged = concerning(kernel, failure.pid, failure.words, failure.time)
        return replace(failure, kernel=logged)

    def _raised_before(self, echo: float) -> list[Failure]:
        """Workers that raised an exception shortly before the time ``echo``, but had not exited
        when the stop killed them: an exit can wait for threads, or for peers."""
        found = []
        for link in self.links.values():
            for killed in list(link.evidence.killed):
                failure = explained(
                    replace(killed, code=None, signal=None),
                    self.context.folder.logs,
                    since=echo - _EXIT_SECONDS,
                )
                if failure.traceback and not failure.is_echo:
                    found.append(failure)
        return found

    def _broken_hosts(self) -> list[tuple[str, KernelMessage]]:
        """Hosts whose kernel reports broken hardware, each with its first such message.

        If a process failed on its own, kernel messages from long before did not cause it.
        """
        own = [failure for failure in map(self._explained, self.failures) if not failure.is_echo]
        since = min((failure.time for failure in own), default=0.0) - RECENT
        found: dict[str, KernelMessage] = {}
        for host, link in self.links.items():
            for message in link.evidence.kernel:
                if message.host and not message.weak and message.time >= since:
                    found.setdefault(host, message)
        return list(found.items())

    def _explained(self, failure: Failure) -> Failure:
        return explained(failure, self.context.folder.logs)


def _lost(state: AttemptState) -> list[str]:
    return [host for host, now in state.hosts.items() if now is HostCondition.LOST]
