"""The Slurm engine: submits the script of a launch plan, and follows the job until it has ended.

Slurm owns the job: it queues it, allocates hosts, starts the processes and ends them. dtrain only
submits, watches and cancels.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from dtrain.checks import Severity
from dtrain.checks.finding import refusal
from dtrain.diagnostics import ExitCode, NodeError
from dtrain.engines.slurm import submission
from dtrain.engines.slurm.follow import SlurmFollower
from dtrain.engines.slurm.inspection import before_launch
from dtrain.engines.slurm.job import SlurmJob
from dtrain.engines.slurm.login import Login
from dtrain.failures.cause import Report
from dtrain.launchplan.plan import LaunchPlan
from dtrain.runs import events
from dtrain.runs.folder import RunFolder
from dtrain.runs.record import Record
from dtrain.runs.request import Request
from dtrain.runs.shown_state import ShownState
from dtrain.runs.status import HostStatus
from dtrain.session.beginning import earlier_run, files_to_send, new_run
from dtrain.session.caller import Caller
from dtrain.session.reporting.recorder import Recorder
from dtrain.sync import Tree
from dtrain.transport.contract import Transport

GONE_SECONDS = 60.0
"""Seconds in which Slurm should end a job that is killed."""
CLEAN_POLL = 1.0


class SlurmEngine:
    """One run. See `dtrain.engines.contract.Engine`."""

    def __init__(self, request: Request, caller: Caller, transport: Transport) -> None:
        self._request = request
        self._transport = transport
        self._caller = caller

    def run(self, secret_values: Mapping[str, str]) -> Report:
        spec = self._request.spec()
        tree = files_to_send(self._request, spec, self._caller.control)
        with new_run(self._request, self._caller, tree) as (record, folder):
            login = Login(self._transport, record)
            job = SlurmJob(record, folder, self._caller, secret_values)
            plan = job.plan
            with job.recorder.awaited(login.answer):
                errors = self._check(job.recorder)
            if errors:
                reason, hint = refusal(errors)
                return job.finish(Report(ExitCode.NODE_FAILED, reason, hint=hint))
            try:
                # Following the job ends a run that was interrupted.
                if tree is not None and not self._caller.control.interrupted:
                    plan = _synced(plan, tree, login, job.recorder)
            except NodeError as error:
                return job.finish(job.failed(error))
            workdir = str(self._request.base) if login.is_here else "~"
            order = submission.submit_order(record, plan, workdir, secret_values)
            return SlurmFollower(job, login, self._caller.control).follow(order)

    def _check(self, recorder: Recorder) -> int:
        """Compare the request with the cluster, and report the findings. Returns the number of
        errors."""
        if not self._request.check or self._request.allocation is not None:
            return 0
        try:
            control = self._caller.control
            found = before_launch(self._request, self._transport, lambda: control.interrupted)
        except KeyboardInterrupt:
            return 0
        if found:
            recorder.record(events.Findings(found))
        return sum(finding.severity is Severity.ERROR for finding in found)

    def attach(self, record: Record, folder: RunFolder, secrets: Mapping[str, str]) -> Report:
        with earlier_run(record, folder, self._caller) as folder:
            job = SlurmJob(record, folder, self._caller, secrets)
            login = Login(self._transport, record)
            return SlurmFollower(job, login, self._caller.control).follow(None)

    def clean(self, record: Record, folder: RunFolder) -> bool:
        """Kill the job, and wait until Slurm has ended it: then no process of it is left."""
        login, until = Login(self._transport, record), time.monotonic() + GONE_SECONDS
        while True:
            try:
                state = login.end()
                if state is None or state.final:
                    replace(record, leftovers=()).save(folder.path)
                    return True
                problem = f"job {record.job_id or record.run} has not ended yet: {state.state}"
            except NodeError as error:
                problem = error.message
            if self._caller.control.wait(CLEAN_POLL) or time.monotonic() > until:
                self._caller.observer.notice(problem)
                return False

    def status(self, record: Record, known: Mapping[str, HostStatus]) -> Mapping[str, HostStatus]:
        try:
            state = Login(self._transport, record).look()
        except NodeError as error:
            return {host: HostStatus(ShownState.UNREACHABLE, None, error.reason) for host in known}
        if state is None:
            return {host: HostStatus("gone", None) for host in known}
        return {host: one.seen(state.word, state.detail) for host, one in known.items()}


def _synced(plan: LaunchPlan, tree: Tree, login: Login, recorder: Recorder) -> LaunchPlan:
    """Send the files of ``job.sync``. Returns the plan with their folder. Raises NodeError."""
    sent = login.send(tree, plan.hosts[0].workdir)
    if sent.sent_files:
        recorder.notice(sent.summary(login.name))
    for notice in (*tree.notices, *sent.notices):
        recorder.notice(notice)
    hosts = tuple(replace(part, workdir=sent.tree_path) for part in plan.hosts)
    return replace(plan, hosts=hosts)
