"""Follows one Slurm job: its state and its output, until Slurm has ended it.

One connection at a time leads to the program on the login node. When it breaks, the job goes on,
and the follower connects again. Requests to stop come from any thread; a writer thread sends them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from dtrain.diagnostics import AnswerError, ConnectError, ExitCode, NodeError
from dtrain.engines.slurm import allocation, submission
from dtrain.engines.slurm.ending import (
    JobEnding,
    failed_tasks,
    latest_attempt,
    lost_hosts,
    of_attempt,
    root_rank,
)
from dtrain.engines.slurm.login import Login
from dtrain.engines.slurm.output import JobOutput, offsets, roles, torchruns
from dtrain.engines.slurm.state import JobState, parse
from dtrain.failures.cause import Failure, Report, in_order_of_blame
from dtrain.messages import slurm as messages
from dtrain.messages.agent import Bye
from dtrain.messages.decode import ProtocolError
from dtrain.node import protocol
from dtrain.runs import journal
from dtrain.runs.journal import Journal
from dtrain.runs.log_store import RunFolder, StorageError, tail
from dtrain.runs.progress import Progress
from dtrain.runs.record import Record
from dtrain.runs.restart import AttemptResult
from dtrain.session.beginning import save
from dtrain.session.control import Control
from dtrain.session.ending import explained
from dtrain.session.liveness import PingLimit
from dtrain.session.notifications import Notifications
from dtrain.session.observer import Observer
from dtrain.session.relay import CommandWriter
from dtrain.session.reports import ProgressReports
from dtrain.spec.model import NotifyEvent

FIRST_DELAY, LAST_DELAY = 1.0, 30.0
"""Seconds before the first and the later attempts to connect again."""
SIZES_SECONDS = 10.0
"""Seconds between two journal entries about the size of the output received so far."""
_SUMMARY = 64 << 10
"""Bytes at the end of a torchrun's stderr, which has its summary."""
GIVE_UP = 3
"""Number of stop requests after which dtrain stops waiting for Slurm."""


class JobFollower:
    def __init__(
        self,
        record: Record,
        folder: RunFolder,
        *,
        login: Login,
        observer: Observer,
        control: Control,
        on_running: Callable[[str], None],
        secrets: Mapping[str, str],
    ) -> None:
        """``on_running`` gets the run's name once the job has a number. ``secrets`` are for
        notifications."""
        self._record = record
        self._folder = folder
        self._login = login
        self._observer = observer
        self._control = control
        self._on_running = on_running
        self._journal = Journal(folder.journal)
        self._notifications = Notifications(
            record.request, folder, self._journal, secrets, self._notify
        )
        self._plan = record.plan()
        self._output = JobOutput(folder, self._plan)
        self._progress = ProgressReports(self._plan, observer, self._journal)
        self._writer = CommandWriter(lambda: PingLimit.NORMAL)
        self._asked = 0
        self._ordered = False
        """Whether the order to submit was sent: the job may exist although its number is
        unknown."""
        self._state: JobState | None = None
        self._script = ""
        self._shown: set[str] = set()
        """Problems that the user has seen."""
        self._sizes_due = 0.0

    # Requests, from any thread and from signal handlers ----------------------------------------

    def interrupt(self, why: str) -> None:
        self._asked += 1
        if self._asked < GIVE_UP:
            self._writer.send({"op": "cancel", "kill": self._asked > 1})
        else:
            self._writer.send({"op": "leave"})

    def detach(self) -> None:
        self._writer.send({"op": "leave"})

    # The connection ----------------------------------------------------------------------------

    def follow(self, order: Mapping[str, Any] | None) -> Report:
        """Follow the job until it is over, or left. ``order`` submits it first."""
        self._control.hand_to(self)
        if order is not None and self._asked:
            return self._finish(Report(ExitCode.INTERRUPTED, self._control.why))
        thread = threading.Thread(target=self._writer.run, name="dtrain-slurm", daemon=True)
        thread.start()
        try:
            report = self._follow(order)
        except StorageError as error:
            problem = f"{error.message}\n{self._still_there()}"
            report = Report(error.exit_code, "this machine cannot store the run's files",
                            problems=(problem,), hint=error.hint)  # fmt: skip
        finally:
            self._writer.finish()
            thread.join()
        if self._control.left:
            self._notifications.close()
            self._observer.left(self._record.run)
            return replace(report, logs=str(self._folder.path))
        return self._finish(report)

    def _follow(self, order: Mapping[str, Any] | None) -> Report:
        delay = FIRST_DELAY
        inside = self._record.request.allocation
        if order is not None and inside is not None:
            try:
                allocation.check(inside, self._login.look(), len(self._plan.hosts))
            except NodeError as error:
                return self._failed(error)
        while True:
            known = offsets(self._folder, self._plan)
            again = submission.follow_order(self._record, self._plan.run_dir, known)
            submits = order is not None and self._record.job_id is None and not self._asked
            chosen = order if submits and order else again
            files = {
                "outputs": self._record.on_hosts,
                "roles": roles(self._plan),
                "torchruns": torchruns(self._plan),
            }
            try:
                if self._serve({**chosen, **files}):
                    if not self._restarted():
                        return self._ended()
                    self._begin_next_attempt()
                    delay = FIRST_DELAY
                    continue
            except (AnswerError, submission.SubmitError) as error:
                return self._failed(error)
            except NodeError as error:
                unknown = self._record.job_id is None
                if submits and not (self._ordered and isinstance(error, ConnectError)):
                    return self._failed(error)
                goes_on = "the job may be submitted" if unknown else "the job goes on"
                self._show_once(f"{error.message}; {goes_on}, connecting again")
            if self._control.left:
                return Report(ExitCode.INTERRUPTED, "left")
            if self._asked >= GIVE_UP:
                return Report(
                    ExitCode.INTERRUPTED, self._control.why, problems=(self._still_there(),)
                )
            self._control.wait(delay)
            delay = min(LAST_DELAY, 2 * delay)

    def _serve(self, order: Mapping[str, Any]) -> bool:
        """Handle what one program sends. Whether the job is over. Raises NodeError."""
        self._output.begin_connection()
        with self._login.opened(order) as channel, self._writing_to(channel):
            self._ordered = True
            # Requests that came before the writer had this connection are lost.
            if self._control.left or self._asked >= GIVE_UP:
                return False
            if self._asked:
                self._writer.send({"op": "cancel", "kill": self._asked > 1})
            try:
                for frame in channel.frames():
                    if isinstance(frame, protocol.Data):
                        self._observer.output(*self._output.keep(frame))
                        self._journal_sizes()
                    elif self._handle(messages.read_message(frame.body)):
                        return True
            except ProtocolError as error:
                raise AnswerError(self._login.name, "following the job", error) from None
            if self._control.left or self._asked >= GIVE_UP:
                return False
            raise channel.failure(self._login.python)

    @contextlib.contextmanager
    def _writing_to(self, channel: Any) -> Iterator[None]:
        channel.pid = 0  # it answers pings from the start
        self._writer.relay = channel
        try:
            yield
        finally:
            self._writer.relay = None

    def _handle(self, message: messages.Message) -> bool:
        """Whether this was the last message."""
        match message:
            case messages.Submitted(job):
                self._number(job)
            case messages.SubmitRefused():
                raise submission.refusal(self._login.name, message)
            case messages.JobDescribed(text):
                self._update(parse(text) if text else None)
            case messages.Trouble(command, text):
                self._show_once(f"{self._login.name}: {command}: {text}")
            case messages.Cancelling():
                self._journal.write(time.time(), journal.StopRequested(self._control.why))
                verb = "stopping the step in" if self._record.request.allocation else "cancelling"
                self._show_once(f"{verb} job {self._record.job_id} ({self._control.why})")
            case messages.JobStreamFound():
                self._output.add(message)
            case messages.WorkerReport(host, name, said):
                # A worker's mistake is not one of the login node.
                with contextlib.suppress(KeyError, TypeError, ValueError):
                    if said["event"] == "progress":
                        report = Progress.read(name.removesuffix(".progress"), said)
                        self._progress.add(host, report)
            case messages.ScriptOutput(text):
                self._script = text
                if self._state is not None and lost_hosts(text):
                    self._show_hosts(self._state)
            case Bye():
                return True
        return False

    # The job -----------------------------------------------------------------------------------

    def _number(self, job: str | None) -> None:
        """The job has a number, or (None) it was never submitted."""
        if job is not None and job != self._record.job_id:
            self._record = replace(self._record, job_id=job)
            save(self._record, self._folder)
            inside = self._record.request.allocation
            self._notify(f"starting in job {job}" if inside else f"job {job} is submitted")
            self._on_running(self._record.run)

    def _update(self, state: JobState | None) -> None:
        """Show the job's state; None if Slurm no longer knows the job."""
        before, self._state = self._state, state
        if state is None or state.final or state.restarts >= self._record.attempt:
            self._writer.send({"op": "finish"})
        if state is None or state.restarts >= self._record.attempt:
            return
        # The list of a job that lost a host is shorter.
        complete = not state.queued and len(state.hosts) == len(self._plan.hosts)
        if complete and state.hosts != self._record.allocated:
            self._allocate(state.hosts)
        reason = before.explanation if before is not None else ""
        if state.queued and state.reason and state.explanation != reason:
            start = f"; expected start {state.start}" if state.start else ""
            self._notify(f"job {self._record.job_id} is queued: {state.explanation}{start}")
        if before is None or (state.word, state.explanation) != (before.word, before.explanation):
            self._show_hosts(state)

    def _allocate(self, hosts: tuple[str, ...]) -> None:
        self._record = replace(self._record, allocated=hosts)
        self._plan = save(self._record, self._folder)
        self._journal.write(time.time(), journal.HostsAllocated(hosts))
        self._observer.allocated(self._plan)

    def _show_hosts(self, state: JobState) -> None:
        detail = state.explanation if state.queued else ""
        lost = lost_hosts(self._script)
        for part in self._plan.hosts:
            host = part.host.name
            word = "lost" if state.final and host in lost else state.word
            self._observer.host_state(host, word, detail)
            self._journal.write(time.time(), journal.HostState(host, word, detail))

    # The end -----------------------------------------------------------------------------------

    def _ended(self) -> Report:
        job = self._record.job_id
        if job is None:
            if self._asked:
                return Report(ExitCode.INTERRUPTED, self._control.why)
            return Report(ExitCode.NODE_FAILED, "the job was never submitted")
        report = self._ending(job).report()
        if report.exit_code is ExitCode.INTERRUPTED and self._state is not None:
            inside = self._record.request.allocation
            what = f"the step in job {job} is stopped" if inside else f"job {job} is cancelled"
            self._notify(f"{what}; nothing of it runs")
        return report

    def _ending(self, job: str) -> JobEnding:
        """How the current attempt ended."""
        # A job may end before Slurm is asked for its hosts.
        if not self._record.allocated and (hosts := self._output.hosts()):
            self._allocate(hosts)
        script = of_attempt(self._script, self._record.attempt)
        failed = failed_tasks(script, self._plan, time.time())
        return JobEnding(
            job=job,
            state=self._state,
            plan=self._plan,
            script=script,
            failures=in_order_of_blame(map(self._explained, failed)),
            stopped_by=self._control.why if self._asked else "",
        )

    def _restarted(self) -> bool:
        """Whether another attempt follows the one that has ended."""
        known = self._state.restarts + 1 if self._state is not None else 1
        return max(known, latest_attempt(self._script)) > self._record.attempt

    def _begin_next_attempt(self) -> None:
        job, number = str(self._record.job_id), self._record.attempt
        report = self._complete(self._ending(job).before_restart())
        culprit = report.failures[0].host if report.failures else None
        result = AttemptResult(ran=True, step=self._progress.step, culprit=culprit)
        self._journal.write(time.time(), journal.AttemptFailed(number, result, report))
        self._notifications.send("restarted", number, report)
        again = "starts again" if self._record.request.allocation else "is queued again"
        self._notify(f"{report.reason}; job {job} {again} (restart {number})")
        self._record = replace(self._record, attempt=number + 1, allocated=())
        self._folder = replace(self._folder, attempt=number + 1)
        self._plan = save(self._record, self._folder)
        self._output = JobOutput(self._folder, self._plan)
        self._progress = ProgressReports(self._plan, self._observer, self._journal)
        hosts = tuple(part.host.name for part in self._plan.hosts)
        self._journal.write(time.time(), journal.NextAttempt(number + 1, hosts, ()))
        self._observer.next_attempt(number + 1, self._plan)
        self._state, self._script = None, ""

    def _explained(self, failure: Failure) -> Failure:
        name = f"{failure.role}-{failure.index}.err"
        logs = self._folder.logs
        stderr = tail(logs / failure.host / name, _SUMMARY).decode(errors="replace")
        return explained(root_rank(failure, stderr), logs)

    def _failed(self, error: NodeError) -> Report:
        """The report if the job was not submitted, or cannot be followed."""
        if self._record.job_id is None:
            reason = f"not submitted: {error.attempted} on {error.host} failed"
            return Report(error.exit_code, reason, problems=(error.message,), hint=error.hint)
        problems = (error.message, self._still_there())
        return Report(error.exit_code, "the job cannot be followed", problems=problems,
                      hint=error.hint)  # fmt: skip

    def _still_there(self) -> str:
        job = self._record.job_id
        if job is None:
            run = self._record.run
            return f"the job may be submitted: `squeue --name={run}` shows it"
        return (
            f"job {job} may still be there: `squeue --job={job}` shows it, `scancel {job}` ends it"
        )

    def _finish(self, report: Report) -> Report:
        self._sizes_due = 0.0
        self._journal_sizes()
        report = self._complete(report)
        if report.exit_code is not ExitCode.INTERRUPTED:
            event: NotifyEvent = "done" if report.ok else "failed"
            self._notifications.send(event, self._record.attempt, report)
        self._notifications.close()
        self._journal.write(time.time(), journal.Finished(report))
        self._observer.finished(report)
        return report

    def _complete(self, report: Report) -> Report:
        """The report with the run's folder and duration."""
        seconds = max(0.0, time.time() - self._record.started)
        return replace(report, seconds=seconds, logs=str(self._folder.path))

    # The run's records -------------------------------------------------------------------------

    def _notify(self, text: str) -> None:
        self._observer.notice(text)
        self._journal.write(time.time(), journal.NoticeShown(text))

    def _show_once(self, text: str) -> None:
        if text not in self._shown:
            self._shown.add(text)
            self._notify(text)

    def _journal_sizes(self) -> None:
        if time.monotonic() >= self._sizes_due:
            self._sizes_due = time.monotonic() + SIZES_SECONDS
            if sizes := self._output.changed_sizes():
                self._journal.write(time.time(), journal.Sizes(sizes))
