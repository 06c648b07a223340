"""Follows one job on Kubernetes until it has ended and its objects are deleted."""

from __future__ import annotations

import contextlib
import queue
import time
from dataclasses import replace
from typing import Any

from dtrain.diagnostics import ExitCode, NodeError
from dtrain.engines.followed_run import not_begun
from dtrain.engines.kubernetes.client import Client, ForbiddenError
from dtrain.engines.kubernetes.job import FollowedPod, KubernetesJob
from dtrain.engines.kubernetes.launched import GONE_SECONDS, LaunchedJob
from dtrain.engines.kubernetes.manifest import EXIT_SECONDS
from dtrain.engines.kubernetes.reading import (
    JobSeen,
    LogEnded,
    LogProblem,
    PodChanged,
    PodEvent,
    PodLines,
    PodsListed,
    Readers,
    ServerNotice,
    Warned,
)
from dtrain.engines.kubernetes.watcher import WatcherEnded, WatcherFailed, WatcherSaid
from dtrain.failures.cause import Report
from dtrain.runs.storage import StorageError
from dtrain.session.stopping.control import Control, Force

TICK = 0.2
"""Seconds between two looks at requests to stop."""
LOG_SECONDS = 30.0
"""Seconds without a line to wait for the last lines of pods that have ended."""


class KubernetesFollower:
    def __init__(self, job: KubernetesJob, client: Client, control: Control) -> None:
        self._job = job
        self._launched = LaunchedJob(client, job.plan, lambda: control.force)
        self._control = control
        # Readers go on after a request to stop, which would end their requests early.
        self._readers = Readers(client, LaunchedJob(client, job.plan))
        self._stopped_with = Force.NONE
        """The force of the last stop request that the server has."""
        self._quiet_since: float | None = None
        """When the attempt was over and its last line had come; None while it runs."""
        self._attached = False
        """Whether the pods of this attempt were there before."""
        self._gone_due: float | None = None
        """When the pods should be gone; None unless dtrain has deleted the job."""

    def follow(self, submit: dict[str, Any] | None) -> Report:
        """Follow the job until it is over, or left. ``submit``: the objects to create first, in
        order."""
        job = self._job
        if submit is not None:
            if self._control.force:
                return job.finish(Report(ExitCode.INTERRUPTED, self._control.why))
            try:
                with job.recorder.awaited(self._launched.answer):
                    self._launched.create(submit)
            except NodeError as error:
                report = not_begun("created", error)
                if problem := self._launched.problem:
                    job.left_over()
                    report = replace(report, problems=(*report.problems, problem))
                return job.finish(report)
            job.created()
        self._attached = submit is None
        self._readers.start()
        try:
            ended = self._follow()
        except StorageError as error:
            if not self._control.force:
                return job.leave_unstored(error)
            job.recorder.notice(error.message)
            ended = self._end()
        finally:
            self._readers.stop()
        return job.leave() if ended is None else job.finish(ended)

    def _follow(self) -> Report | None:
        """The report, or None if the job goes on without this process."""
        job = self._job
        while True:
            self._handle_events()
            hangs = job.watch.look()
            if self._control.left:
                return None
            if self._control.force > self._stopped_with and (report := self._stop()) is not None:
                return report
            if hangs and not job.watch.ends_job:
                job.watch.kill_workers()
            if self._gone_due is None:
                if why := job.watch.why_end or job.why_endless():
                    self._end_for(why)
            elif time.monotonic() > self._gone_due:
                job.recorder.notice_once(
                    f"{job.name} is not gone yet, for example because a machine does not answer:"
                    " a second request to stop kills its pods"
                )
            if not self._attempt_is_read():
                continue
            if self._gone_due is not None or not job.restarts or job.watch.ends_job:
                return self._end()
            self._quiet_since = None
            self._attached = False
            for pod in job.begin_next_attempt():
                self._read(pod)

    def _handle_events(self) -> None:
        """Handle the events of one tick: what follows looks at all pods, and hundreds of them
        report something each second."""
        until = time.monotonic() + TICK
        with contextlib.suppress(queue.Empty):
            while (left := until - time.monotonic()) > 0:
                self._handle(self._readers.events.get(timeout=left))

    def _handle(self, event: PodEvent) -> None:
        job = self._job
        match event:
            case PodsListed(pods):
                for new in job.listed(pods):
                    self._read(new)
            case PodChanged(pod, removed):
                self._read(job.pod_seen(pod, removed=removed))
            case JobSeen(state, reason):
                job.job_seen(state, reason)
                self._readers.pods_missing = job.pods_missing
                self._readers.slow_pod = job.hosts.slow_pod
            case PodLines():
                job.keep(event)
                if self._quiet_since is not None and job.container_ended(event.uid):
                    self._quiet_since = time.monotonic()
            case LogProblem(uid, text):
                job.log_problem(uid, text)
            case LogEnded(uid, whole):
                job.log_ended(uid, whole=whole)
            case Warned(text, pod):
                job.hosts.warned(text, pod)
            case ServerNotice(text):
                job.recorder.notice(text)
            case WatcherSaid() | WatcherFailed() | WatcherEnded():
                job.watcher_event(event)

    def _read(self, pod: FollowedPod | None) -> None:
        if pod is None:
            return
        self._readers.read_log(pod.pod, pod.cursor, pod.over)
        if not pod.over.is_set():
            plan, attached = self._job.plan, self._attached
            watcher = self._readers.watch(plan, pod.pod, pod.over, attached=attached)
            self._job.watched(pod, watcher)

    def _attempt_is_read(self) -> bool:
        """Whether the attempt is over, and its output is stored or no longer awaited."""
        job = self._job
        gone = job.seen and job.state is None
        if not (gone or job.restarts or (job.state is not None and job.state.over)):
            self._quiet_since = None
            return False
        if self._quiet_since is None:
            if not self._list_pods():
                return False
            self._quiet_since = time.monotonic()
        if gone or job.restarts:
            for pod in job.pods.values():
                pod.over.set()
        limit = LOG_SECONDS + job.plan.job.grace
        if not job.all_read and time.monotonic() > self._quiet_since + limit:
            job.give_up_logs()
        return job.all_read

    def _list_pods(self) -> bool:
        """Find pods that the watch has not shown yet. Returns whether the server has answered."""
        try:
            pods = self._launched.pods()
        except ForbiddenError:
            return True  # without that permission, no output can be read
        except NodeError:
            return False
        self._handle(PodsListed(pods))
        return True

    def _stop(self) -> Report | None:
        """Delete the job, or kill its pods. The report, once dtrain gives up."""
        job, force = self._job, self._control.force
        if force is Force.GIVE_UP:
            return job.given_up(self._control.why, self._launched.still_there)
        try:
            if not self._stopped_with:
                job.stopping(self._control.why)
                self._delete_job()
            if force is Force.KILL:
                self._launched.kill_pods()
        except NodeError as error:
            self._try_again(error)
            return None
        self._stopped_with = force
        return None

    def _end_for(self, why: str) -> None:
        job = self._job
        job.ending(why)
        try:
            self._delete_job()
        except NodeError as error:
            self._try_again(error)

    def _delete_job(self) -> None:
        self._launched.delete_job()
        grace = self._job.plan.job.grace
        self._gone_due = time.monotonic() + grace + EXIT_SECONDS + GONE_SECONDS

    def _try_again(self, error: NodeError) -> None:
        self._job.recorder.notice_once(f"{error.message}; trying again")
        self._control.wait(1.0)

    def _end(self) -> Report:
        """Delete what is left, and wait until it is gone."""
        job = self._job
        report = job.ended(self._control.why if self._control.force else "")
        problem = self._launched.delete_or_report()
        if problem:
            job.left_over()
            return replace(
                report,
                problems=(*report.problems, problem),
                hint=report.hint or f"`dtrain stop {job.record.run}` tries again",
            )
        if report.exit_code is ExitCode.INTERRUPTED:
            job.recorder.notice(f"{job.name} is deleted; nothing of it runs")
        return report
