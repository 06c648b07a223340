"""One Slurm job: what is known of it, kept in the run's record and shown to the user."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from dtrain.diagnostics import ExitCode, NodeError
from dtrain.engines.followed_run import FollowedRun, not_begun
from dtrain.engines.slurm.ending import (
    SlurmEnding,
    failed_tasks,
    finished_tasks,
    latest_attempt,
    lost_hosts,
    of_attempt,
)
from dtrain.engines.slurm.output import JobOutput, roles, torchruns
from dtrain.engines.slurm.script import step_processes
from dtrain.engines.slurm.state import SlurmState
from dtrain.engines.slurm.step import program_start
from dtrain.engines.slurm.submission import SubmitError, job_order
from dtrain.engines.slurm.watch import SlurmWatch
from dtrain.failures.cause import LEFT, Report, in_order_of_blame
from dtrain.node import protocol
from dtrain.node.slurm.orders import Following, OutputFiles
from dtrain.runs import events
from dtrain.runs.folder import RunFolder
from dtrain.runs.record import Record
from dtrain.runs.shown_state import ShownState
from dtrain.session.caller import Caller


class SlurmJob(FollowedRun):
    def __init__(
        self, record: Record, folder: RunFolder, caller: Caller, secrets: Mapping[str, str]
    ) -> None:
        super().__init__(record, folder, caller, secrets)
        self.may_exist = False
        """Whether Slurm may have the job, even if its number is unknown."""
        self._begin_attempt()

    def _begin_attempt(self) -> None:
        self.output = JobOutput(self.folder, self.plan)
        self.watch = SlurmWatch(self.plan, self.folder, self.recorder)
        self._state: SlurmState | None = None
        self._script = ""
        self._labels = [process.label for _, process in step_processes(self.plan)]
        """Those of the tasks of the main step."""
        self._ends: dict[int, float] = {}
        """When each of these tasks ended."""
        self._stopping = False

    def follow_order(self) -> Following:
        """The order to follow the job from what has arrived."""
        return {
            "op": "follow",
            **job_order(self.record),
            "job": self.record.job_id,
            "offsets": self.folder.offsets(self.plan),
        }

    def files(self) -> OutputFiles:
        """The part of each order that names the job's output files."""
        return {
            "outputs": self.plan.run,
            "roles": roles(self.plan),
            "torchruns": torchruns(self.plan),
            "watch": {
                "nodes": len(self.plan.hosts),
                "world_size": self.plan.world_size,
                "folder": f"{self.plan.run_dir}/nodes/{self.plan.run}",
                "start": program_start(self.plan, "dtrain-watch"),
            },
        }

    # What the login node reports -----------------------------------------------------------------

    def number(self, job: str | None) -> None:
        """The job has a number, or (None) it was never submitted."""
        if job is not None and job != self.record.job_id:
            self.change(job_id=job)
            inside = self.record.request.allocation
            self.begun(f"starting in job {job}" if inside else f"job {job} is submitted")

    def keep(self, frame: protocol.Data) -> None:
        """Store and show a piece of output. Raises ProtocolError and StorageError."""
        stream, size = self.output.keep(frame)
        self.recorder.observer.output(stream, size)
        self.watch.printed(stream, frame.payload)

    def update(self, state: SlurmState | None) -> bool:
        """Show the job's state; None if Slurm no longer knows the job. Returns whether the current
        attempt is over."""
        before, self._state = self._state, state
        self.watch.update(state)
        if state is None or state.restarts >= self.record.attempt:
            return True
        # The list of a job that lost a host is shorter.
        complete = not state.queued and len(state.hosts) == len(self.plan.hosts)
        if complete and state.hosts != self.record.allocated:
            self._allocate(state.hosts)
        detail = before.detail if before is not None else ""
        if state.detail and state.detail != detail:
            start = f"; expected start {state.start}" if state.queued and state.start else ""
            waits = "is queued" if state.queued else "does not run"
            self.recorder.notice(f"job {self.record.job_id} {waits}: {state.detail}{start}")
        if before is None or (state.word, state.detail) != (before.word, before.detail):
            self._show_hosts(state)
        return state.final

    def task_ended(self, host: str, number: int, then: float) -> None:
        """A task of the main step has ended, with any status."""
        if number < len(self._labels):
            self._ends[number] = then
            self.watch.ended(host, self._labels[number], then)

    def script_said(self, text: str) -> None:
        """``text`` is the end of what the job's script has written."""
        self._script = text
        if self._state is not None and lost_hosts(text):
            self._show_hosts(self._state)

    def cancelling(self, why: str, *, kill: bool) -> None:
        """It is repeated for as long as the controller is away."""
        if not self._stopping:
            self._stopping = True
            self.recorder.record(events.StopRequested(why))
        verb = "stopping the step in" if self.record.request.allocation else "cancelling"
        self.recorder.notice_once(f"{verb} job {self.record.job_id} ({why})")
        if kill:
            text = "killing its processes"
            self.recorder.notice_once(text, f"{text}; Ctrl-C again no longer waits for Slurm")

    def _allocate(self, hosts: tuple[str, ...]) -> None:
        try:
            self.change(allocated=hosts)
        finally:
            self.watch.allocated(self.plan)
            self.recorder.allocated(self.plan)

    def _show_hosts(self, state: SlurmState) -> None:
        lost = lost_hosts(self._script)
        for host in self.plan.host_names:
            word = ShownState.LOST if state.final and host in lost else state.word
            self.recorder.record(events.HostState(host, word, state.detail))

    # The end of an attempt -----------------------------------------------------------------------

    def has_restarted(self) -> bool:
        """Whether another attempt follows the one that has ended."""
        known = self._state.restarts + 1 if self._state is not None else 1
        return max(known, latest_attempt(self._script)) > self.record.attempt

    def begin_next_attempt(self) -> None:
        job = str(self.record.job_id)
        self.watch.close()
        again = "starts again" if self.record.request.allocation else "is queued again"
        self.next_attempt(
            self._ending(job).before_restart(),
            f"job {job} {again}",
            step=self.watch.progress.step,
            allocated=(),
        )
        self._begin_attempt()

    def ended(self, stopped_by: str) -> Report:
        """How the job ended. ``stopped_by``: the source of a request to stop; empty without one."""
        job = self.record.job_id
        if job is None:
            if stopped_by:
                return self._unended(Report(ExitCode.INTERRUPTED, stopped_by))
            why = "Slurm does not know the job" if self.may_exist else "the job was never submitted"
            return self._unended(Report(ExitCode.NODE_FAILED, why))
        report = self._ending(job, stopped_by).report()
        if report.exit_code is ExitCode.INTERRUPTED and self._state is not None:
            inside = self.record.request.allocation
            what = f"the step in job {job} is stopped" if inside else f"job {job} is cancelled"
            self.recorder.notice(f"{what}; nothing of it runs")
        return report

    def failed(self, error: NodeError) -> Report:
        """The report if the job was not submitted, or cannot be followed."""
        if not self.may_exist and isinstance(error, SubmitError):
            said, _, more = error.reason.partition("\n")
            problems = (f"{error.host}: {more}",) if more else ()
            reason = f"not submitted: {said}"
            return Report(error.exit_code, reason, problems=problems, hint=error.hint)
        if not self.may_exist:
            return not_begun("submitted", error)
        why, problems = "the job cannot be followed", (error.message,)
        return self._unended(Report(error.exit_code, why, problems=problems, hint=error.hint))

    def _unended(self, report: Report) -> Report:
        """``report`` of a run whose job is not known to have ended."""
        if not self.may_exist:
            return report
        self.left_over()
        hint = f"{report.hint}\n`dtrain stop {self.record.run}` ends it".lstrip()
        return replace(report, problems=(*report.problems, self.still_there()), hint=hint)

    def still_there(self) -> str:
        """How to find and end a job that is no longer followed."""
        job = self.record.job_id
        if job is None:
            run = self.record.run
            return f"the job may be submitted: `squeue --name={run}` shows it"
        return (
            f"job {job} may still be there: `squeue --job={job}` shows it, `scancel {job}` ends it"
        )

    def _ending(self, job: str, stopped_by: str = "") -> SlurmEnding:
        """How the current attempt ended."""
        # A job may end before Slurm is asked for its hosts.
        if not self.record.allocated and (hosts := self.output.hosts()):
            self._allocate(hosts)
        script = of_attempt(self._script, self.record.attempt)
        failed = failed_tasks(script, self.plan, time.time())
        numbers = {self.explained(failure): number for number, failure in failed.items()}
        workers = self.watch.workers
        return SlurmEnding(
            job=job,
            state=self._state,
            plan=self.plan,
            script=script,
            failures=tuple(
                replace(failure, time=self._ends.get(numbers[failure], failure.time))
                for failure in in_order_of_blame(numbers)
            ),
            stopped_by=stopped_by,
            hang=workers.why,
            waits=tuple(workers.whereabouts()) if workers.why else (),
            finished=tuple(finished_tasks(self.plan, failed, self._ends)),
        )

    # The end of the run --------------------------------------------------------------------------

    def leave(self, report: Report = LEFT) -> Report:
        self.watch.close()
        return super().leave(report)

    def finish(self, report: Report) -> Report:
        self.watch.close()
        return super().finish(report)
