"""Runs a launch from the user's request to the report: ports, attempts, restarts.

Each `Attempt` runs the job once. The engine owns what all attempts share: the run's folder and
journal, and the choice of hosts for the next attempt. A `Control` requests a stop.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from dtrain import hostlist
from dtrain.diagnostics import DtrainError, ExitCode
from dtrain.engines.ssh import history
from dtrain.engines.ssh.attempt import Attempt
from dtrain.engines.ssh.cleanup import Cleanups
from dtrain.engines.ssh.context import AttemptContext
from dtrain.engines.ssh.guarded import fault
from dtrain.engines.ssh.inquiry import ask
from dtrain.engines.ssh.inspection import Inspection
from dtrain.engines.ssh.ports import draw_ports
from dtrain.engines.ssh.readiness import Spares
from dtrain.failures import alike
from dtrain.failures.cause import Report
from dtrain.launchplan.plan import LaunchPlan
from dtrain.runs import events, restart
from dtrain.runs.folder import RunFolder
from dtrain.runs.observed import ObservedRun
from dtrain.runs.record import Record
from dtrain.runs.request import Request
from dtrain.runs.status import HostStatus
from dtrain.runs.storage import CANNOT_STORE, StorageError
from dtrain.runtime.layout_rules import MisfitError
from dtrain.session.beginning import earlier_run, files_to_send, new_run
from dtrain.session.caller import Caller
from dtrain.session.run import Run
from dtrain.session.watching.reports import ProgressReports
from dtrain.sync import Tree
from dtrain.transport.contract import Transport

CLEAN_POLL = 0.2
CLEAN_SECONDS = 60.0
"""Seconds that `SshEngine.clean` tries to reach a host: the user waits, and can repeat it."""
CLEAN_NOTICE_SECONDS = 3.0
"""Seconds after which a notice names the hosts that cannot be reached yet."""


class SshEngine:
    """A launch, or an earlier run that this process takes over. `run` and `attach` block until the
    run is over and cleaned up, or until the `Control` leaves."""

    def __init__(self, request: Request, caller: Caller, transport: Transport) -> None:
        self._request = request
        self._spec = request.spec()
        self._transport = transport
        self._caller = caller
        self._attempt: Attempt | None = None
        self._cleanups = Cleanups(transport)
        self._known: set[str] = set()
        """Hosts that were checked, or that an earlier attempt used."""
        self._proven: set[str] = set()
        """Hosts on which an attempt ran the job."""
        self._has_run = False
        self._tree: Tree | None = None
        """The files of ``job.sync``, once a start has needed them."""

    def run(self, secret_values: Mapping[str, str]) -> Report:
        """Launch, follow, clean up. The observer has received the report when this returns.

        Raises StorageError if this machine cannot store the run's files, and DtrainError if the
        folder to sync cannot be read. In both cases nothing has been started.
        """
        self._tree = files_to_send(self._request, self._spec, self._caller.control)
        with new_run(self._request, self._caller, self._tree) as (record, folder):
            run = Run(record, folder, self._caller, secret_values)
            for notice in self._tree.notices if self._tree is not None else ():
                run.recorder.notice(notice)
            return self._run_attempts(run, lambda: self._start(run))

    def attach(self, record: Record, folder: RunFolder, secrets: Mapping[str, str]) -> Report:
        """Take over a run that no other process is in charge of, until it ends or is left.

        ``secrets`` are needed only for restarts.
        """
        with earlier_run(record, folder, self._caller) as folder:
            run = Run(record, folder, self._caller, secrets)
            self._known = set(run.plan.host_names)
            self._proven = set(self._known)
            self._clean_up(run, run.record.leftovers)
            return self._run_attempts(run, lambda: self._reattach(run))

    # Attempts ----------------------------------------------------------------------------------

    def _run_attempts(self, run: Run, first: Callable[[], tuple[Report, Attempt]]) -> Report:
        """Run attempts until the job ends and no restart follows. Returns the last report."""
        # A previous launcher may already have journaled the end of this attempt.
        earlier = ObservedRun.read(run.folder).results
        results = [earlier[number] for number in sorted(earlier) if number < run.record.attempt]
        report = Report(ExitCode.NODE_FAILED, CANNOT_STORE)
        try:
            report, attempt = first()
            while not (self._caller.control.left or attempt.left):
                uncleaned = [(host, run.record.attempt) for host in attempt.uncleaned()]
                run.record = replace(run.record, leftovers=(*run.record.leftovers, *uncleaned))
                if self._caller.control.interrupted or not attempt.has_failed:
                    break
                results.append(attempt.result())
                decision = self._decide(run, results)
                if isinstance(decision, restart.GiveUp):
                    if decision.why:
                        run.recorder.notice(f"not restarted: {decision.why}")
                    break
                self._clean_up(run, uncleaned)
                then = _describe_next_attempt(run.record, decision)
                if not run.recorder.latest.startswith(report.reason):
                    then = f"{report.reason}; {then}"
                run.attempt_failed(report, results[-1])
                for problem in report.problems:
                    run.recorder.notice(problem)
                run.recorder.notice(then)
                if self._caller.control.wait(decision.delay):
                    why = self._caller.control.why
                    report = replace(report, exit_code=ExitCode.INTERRUPTED, reason=why)
                    break
                self._save_uncleaned(run)
                run.begin_attempt(run.record.after(decision))
                report, attempt = self._start(run)
        except StorageError as error:
            report = replace(report, problems=(*report.problems, error.message), hint=error.hint)
        finally:
            self._cleanups.close()
        return self._finish(run, report)

    def _decide(
        self, run: Run, results: list[restart.AttemptResult]
    ) -> restart.Retry | restart.GiveUp:
        cluster, job = self._spec.cluster, self._spec.job
        workers = {host.name: host.workers for host in cluster.hosts + cluster.spares}
        decision = restart.decide(
            job.restart,
            results,
            [host.name for host in run.record.spec().cluster.spares],
            hosts=len(cluster.hosts) - len(run.record.dropped),
            elastic=job.elastic,
            # A layout needs the number of workers that the cluster file's hosts have.
            fits=lambda host, spare: job.layout is None or workers[host] == workers[spare],
        )
        if isinstance(decision, restart.GiveUp):
            return decision
        if why := self._missing_for_start(run):
            return restart.GiveUp(why)
        try:
            return run.record.fitting(decision, results[-1].lost)
        except MisfitError as misfit:
            return restart.GiveUp(misfit.message)

    def _usable_spares(self, run: Run) -> int:
        """The number of spares that can replace any host if the current attempt fails."""
        job, cluster = self._spec.job, run.record.spec().cluster
        if run.record.attempt > job.restart.max:
            return 0
        sizes = {host.workers for host in cluster.hosts}
        return sum(job.layout is None or {one.workers} == sizes for one in cluster.spares)

    def _missing_for_start(self, run: Run) -> str:
        """Why this process cannot start the job; empty if it can."""
        if not run.secrets.keys() >= {*self._spec.job.secrets}:
            return "this environment does not have all of job.secrets"
        if self._tree is None and self._spec.job.sync is not None:
            try:
                self._tree = files_to_send(self._request, self._spec, self._caller.control)
            except DtrainError as error:
                return error.message
        return ""

    def clean(self, record: Record, folder: RunFolder) -> bool:
        """End processes that a finished run may have left on hosts that were unreachable then.

        Hosts must be reachable within `CLEAN_SECONDS`. Returns whether all are clean.
        """
        run = Run(record, folder, self._caller, {})
        self._clean_up(run, run.record.leftovers)
        begun = time.monotonic()
        until = begun + CLEAN_SECONDS
        notified = False
        while self._cleanups.pending and time.monotonic() < until:
            if self._caller.control.wait(CLEAN_POLL):
                break
            if not notified and time.monotonic() > begun + CLEAN_NOTICE_SECONDS:
                notified = True
                waiting = hostlist.fold(self._cleanups.pending)
                limit = f"retrying for {CLEAN_SECONDS:g} s; Ctrl-C gives up"
                run.recorder.notice(f"{waiting} cannot be reached yet; {limit}")
                for why in alike.messages(self._cleanups.problems, self._spec.cluster.hosts):
                    run.recorder.notice(why)
        self._cleanups.close()
        self._save_uncleaned(run)
        left = tuple(host for host, _ in run.record.leftovers)
        if left:
            hosts = hostlist.fold(dict.fromkeys(left))
            self._caller.observer.notice(f"processes of the run may be left on {hosts}")
        report = ObservedRun.read(folder).report
        if report is not None:
            report = with_uncleaned(report, run.record, record)
            run.recorder.record(events.Cleaned(report.problems, report.hint))
        return not run.record.leftovers

    def status(self, record: Record, known: Mapping[str, HostStatus]) -> Mapping[str, HostStatus]:
        """The state of each host, from the host itself."""
        return ask(record, known, self._transport)

    def _clean_up(self, run: Run, leftovers: Sequence[tuple[str, int]]) -> None:
        """Begin to end what attempts may have left, each given as its host and number."""

        def report(bug: Exception) -> None:
            run.recorder.notice_once(fault(bug, run.folder.path).message)

        self._cleanups.start(run.record, leftovers, report)

    def _save_uncleaned(self, run: Run) -> None:
        """Save which hosts may still run processes of an attempt."""
        clean = self._cleanups.clean
        leftovers = tuple(each for each in run.record.leftovers if each not in clean)
        run.record = replace(run.record, leftovers=leftovers)
        with contextlib.suppress(StorageError):
            run.record.save(run.folder.path)

    def _report_running(self, plan: LaunchPlan) -> None:
        self._proven.update(plan.host_names)
        if not self._has_run:
            self._has_run = True
            self._caller.on_running(plan.run)

    def _start(self, run: Run) -> tuple[Report, Attempt]:
        """Run one attempt. If its port is busy, try other ports."""
        last = run.record.port if run.record.attempt > 1 else None
        ports = iter(draw_ports(run.record.spec(), last))
        run.change(port=next(ports))
        while True:
            port = next(ports, None)
            attempt = self._prepare(run, movable_port=port is not None)
            report = attempt.run()
            if port is None or self._caller.control.interrupted or not attempt.only_ports_are_busy:
                return report, attempt
            run.change(port=port)
            run.recorder.notice(f"{attempt.problems[0].message}; trying port {port}")

    def _reattach(self, run: Run) -> tuple[Report, Attempt]:
        """Continue the current attempt. If the previous launcher had started nothing, start it from
        the beginning."""
        attempt = self._prepare(run, movable_port=False)
        known = ObservedRun.read(run.folder).attempt
        received = history.received(known, run.folder, run.plan)
        age = time.time() - (known.began or time.time())
        report = attempt.attach(received, history.reported(known), age)
        if not attempt.is_unknown or any(received.values()) or self._caller.control.interrupted:
            return report, attempt
        if why := self._missing_for_start(run):
            run.recorder.notice(f"not started: {why}")
            return report, attempt
        run.recorder.notice("no host had started it yet; starting it now")
        # The previous launcher may not have reported its findings.
        self._known, self._proven = set(), set()
        return self._start(run)

    def _prepare(self, run: Run, *, movable_port: bool) -> Attempt:
        plan = run.plan
        newcomers = set(plan.host_names) - self._known
        self._known |= newcomers
        inspection = None
        if self._request.check and newcomers:
            inspection = Inspection(
                plan,
                newcomers,
                base=self._request.base,
                report=lambda found: run.recorder.record(events.Findings(tuple(found))),
            )
        context = AttemptContext(
            plan=plan,
            movable_port=movable_port,
            base=self._request.base,
            secrets={name: run.secrets.get(name, "") for name in self._spec.job.secrets},
            transport=self._transport,
            tree=self._tree,
            folder=run.folder,
            recorder=run.recorder,
            inspection=inspection,
            progress=ProgressReports(plan, run.recorder),
            proven_hosts=frozenset(self._proven),
            spares=Spares(self._usable_spares(run)),
            all_hosts=self._spec.cluster.hosts + self._spec.cluster.spares,
        )
        attempt = Attempt(context, lambda: self._report_running(plan))
        self._attempt = attempt
        self._caller.control.hand_to(attempt)
        return attempt

    def _finish(self, run: Run, report: Report) -> Report:
        if self._attempt is not None and self._attempt.left and not self._caller.control.left:
            return run.unattended(report)
        if self._caller.control.left:
            running = self._attempt is not None and self._attempt.still_running
            return run.left(report, still_running=running)
        self._save_uncleaned(run)
        report = with_uncleaned(report, run.record)
        lacks_output = self._attempt is not None and self._attempt.lacks_output
        return run.finish_unstored(report) if lacks_output else run.finish(report)


def _describe_next_attempt(record: Record, decision: restart.Retry) -> str:
    then = record.after(decision)
    listed = len(record.request.spec().cluster.hosts)
    return restart.next_attempt(decision, then.attempt, record.spec(), then.spec(), listed)


def _about_uncleaned(record: Record) -> tuple[list[str], list[str]]:
    """The problems and hints about hosts that may still run processes of the run."""
    if not record.leftovers:
        return [], []
    # The report already names the hosts of the last attempt.
    earlier = [host for host, number in record.leftovers if number < record.attempt]
    text = f"{hostlist.fold(dict.fromkeys(earlier))}: an earlier attempt may still run"
    hints = [f"`dtrain stop {record.run}` ends leftover processes, if it can reach the host"]
    job = record.request.spec().job
    if job.on_disconnect == "stop":
        hints.append(f"a host that is cut off stops its workers after {job.lease:g} s (job.lease)")
    return [text] if earlier else [], hints


def with_uncleaned(report: Report, now: Record, before: Record | None = None) -> Report:
    """The report for the leftovers of ``now``. ``before``: the record whose leftovers it names."""
    problems, hints = _about_uncleaned(now)
    old_problems, old_hints = _about_uncleaned(before) if before is not None else ([], [])
    kept = [line for line in report.hint.split("\n") if line and line not in old_hints]
    return replace(
        report,
        problems=(*(one for one in report.problems if one not in old_problems), *problems),
        hint="\n".join([*kept, *hints]),
    )
