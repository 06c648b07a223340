"""How a job on Kubernetes ended: its report, from its last state and that of its pods. Pure."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence

from dtrain.diagnostics import ExitCode
from dtrain.engines.followed_run import process_failure
from dtrain.engines.kubernetes.kinds import TRAINJOB, job_kind, keys_of
from dtrain.engines.kubernetes.lines import ProcessEnd, stamped
from dtrain.engines.kubernetes.objects import KubernetesJobState, Pod, sentence
from dtrain.engines.kubernetes.script import serving_pods
from dtrain.failures.cause import (
    SIGNALLED,
    Failure,
    Report,
    all_finished,
    ended_early,
    signal_name,
)
from dtrain.launchplan.names import process_name
from dtrain.launchplan.plan import HostPlan, LaunchPlan, Process
from dtrain.records import dataclass
from dtrain.spec.model import Kubernetes

_OUT_OF_MEMORY = "OOMKilled"
_KILLED = SIGNALLED + signal.SIGKILL


@dataclass(frozen=True, slots=True)
class PodEnding:
    """What is known about the end of one pod."""

    pod: Pod
    """Its last state."""
    ends: Sequence[ProcessEnd] = ()
    words: Sequence[str] = ()
    """The last lines that its script wrote."""


@dataclass(frozen=True, slots=True)
class KubernetesEnding:
    """What is known about the end of an attempt."""

    name: str
    state: KubernetesJobState | None
    """None if the job is gone."""
    plan: LaunchPlan
    pods: Sequence[PodEnding]
    failures: tuple[Failure, ...]
    """The first cause first."""
    deleted: Pod | None = None
    """The first pod that was deleted, if none had failed before."""
    stopped_by: str = ""
    """Source of the request to stop, such as ``Ctrl-C``."""
    finished: bool = False
    """Whether dtrain has deleted the job after its processes were done."""
    hang: str = ""
    """The hang for which dtrain ended the attempt."""
    waits: tuple[str, ...] = ()
    """Where its workers waited."""

    def report(self) -> Report:
        # A job that is gone was cleaned up, if its processes were done.
        gone = self.state is None and done(self.plan, [ending.pod for ending in self.pods])
        if self.finished or gone or (self.state is not None and self.state.done):
            return Report(ExitCode.OK, all_finished(self.plan))
        if self.stopped_by:
            return Report(ExitCode.INTERRUPTED, self.stopped_by)
        if self.hang:
            return self.failed()
        again = any(ending.pod.again for ending in self.pods)
        if self.state is None and not again and self._ended_by_deletion:
            return self._was_deleted(self.name)
        return self.failed()

    def failed(self) -> Report:
        """The report of an attempt that failed."""
        if self.hang:
            return Report(ExitCode.JOB_FAILED, self.hang, problems=self.waits)
        if disrupted := [ending.pod for ending in self.pods if ending.pod.disrupted]:
            pod = disrupted[0]
            return Report(
                ExitCode.NODE_FAILED,
                f"Kubernetes ended {self._host(pod)}: pod {pod.name}"
                + (f" on {pod.machine}" if pod.machine else ""),
                failures=self.failures,
                problems=tuple(dict.fromkeys(pod.disrupted for pod in disrupted)),
                hint=self._restart_hint,
            )
        if self.deleted is not None and self._ended_by_deletion:
            return self._was_deleted(f"{self._host(self.deleted)}: pod {self.deleted.name}")
        words = "\n".join(dict.fromkeys(line for ending in self.pods for line in ending.words))
        if self.failures:
            first = self.failures[0]
            early, why_early = ended_early(self.failures, self._finished_processes())
            return Report(
                ExitCode.JOB_FAILED,
                first.summary,
                failures=self.failures,
                problems=tuple(filter(None, ("" if first.words else words, early))),
                hint=why_early or _hint(first, keys_of(self.plan)),
            )
        reason = self.state.failed if self.state is not None else ""
        problems = [
            f"{self._host(ending.pod)} exited with status {ended.exitCode}: "
            f"{sentence(ended.reason, ended.message)}".rstrip(": ")
            for ending in self.pods
            if (ended := ending.pod.ended) is not None and (ended.exitCode or ended.message)
        ]
        return Report(
            ExitCode.JOB_FAILED,
            f"{self.name} failed" + (f": {reason}" if reason else ""),
            problems=tuple(dict.fromkeys(filter(None, (*problems, words)))),
        )

    def _finished_processes(self) -> Iterator[tuple[str, str, float]]:
        """As `ended_early` gets them."""
        for ending in self.pods:
            part = self.plan.hosts[ending.pod.index]
            labels = {process.name: process.label for process in part.processes}
            for end in ending.ends:
                if end.status == 0 and not end.after_term and end.process in labels:
                    yield labels[end.process], part.host.name, end.time

    @property
    def _ended_by_deletion(self) -> bool:
        """Whether no process failed before a pod was deleted. Compares no times: the server and
        each machine have their own clock."""
        deleted = {self._host(one.pod) for one in self.pods if one.pod.deleted}
        after = _after_term(self.pods)
        return all(
            one.cut_off
            or one.is_echo
            or process_name(one.role, one.index) in after
            # In a pod that was not deleted, what dtrain has seen first came first.
            or (self.deleted is not None and one.host not in deleted)
            for one in self.failures
        )

    def _was_deleted(self, what: str) -> Report:
        why = self.state.failed if self.state is not None else ""
        return Report(
            ExitCode.JOB_FAILED,
            f"{what} was deleted outside dtrain",
            failures=tuple(one for one in self.failures if not one.cut_off),
            problems=(why,) if why else (),
            hint="another `kubectl delete`, an administrator, or a limit of the cluster",
        )

    @property
    def _restart_hint(self) -> str:
        most = self.plan.job.restart.max
        if job_kind(self.plan) is TRAINJOB:
            return "the TrainingRuntime decides whether Kubernetes starts all pods again"
        if most:
            return f"all {most} restarts of job.restart.max are used"
        return "with job.restart.max: 3, Kubernetes starts all pods again after such an end"

    def _host(self, pod: Pod) -> str:
        return self.plan.hosts[pod.index].host.name


def done(plan: LaunchPlan, pods: Sequence[Pod]) -> bool:
    """Whether all processes that the job waits for have ended without an error."""
    succeeded = {pod.index for pod in pods if pod.ended is not None and not pod.ended.exitCode}
    return succeeded >= {part.node_rank for part in plan.hosts} - {*serving_pods(plan)}


def failures(plan: LaunchPlan, pods: Sequence[PodEnding], time: float) -> list[Failure]:
    """The processes that failed. ``time``: when the attempt ended, in seconds since the epoch."""
    found = [failure for ending in pods for failure in _of_pod(plan, ending, time)]
    after = _after_term(pods)
    # The script and Kubernetes end the others after the first failure.
    own = [one for one in found if not (one.cut_off or process_name(one.role, one.index) in after)]
    # A pod that Kubernetes has ended is the cause, and they are not.
    return own if any(ending.pod.disrupted for ending in pods) else own or found


def _after_term(pods: Sequence[PodEnding]) -> set[str]:
    """The processes that ended after the deletion of their pod."""
    return {end.process for one in pods for end in one.ends if end.after_term}


def _of_pod(plan: LaunchPlan, ending: PodEnding, time: float) -> Iterator[Failure]:
    pod, part = ending.pod, plan.hosts[ending.pod.index]
    full = pod.ended is not None and pod.ended.reason == _OUT_OF_MEMORY
    by_name = {process.name: process for process in part.processes}
    failed = [end for end in ending.ends if end.status and end.process in by_name]
    for end in failed:
        yield _failure(part, by_name[end.process], end.status, end.time, full=full)
    code = pod.ended.exitCode if pod.ended is not None else 0
    # The whole container was killed. Without that, the script has said what failed.
    if pod.ended and code and not failed and not pod.disrupted and (full or code > 128):
        ended = {end.process for end in ending.ends}
        left = [process for process in part.processes if process.name not in ended]
        process = (left or part.processes)[0]
        # Other processes fail because of it, before the launcher hears of it.
        if known := stamped((pod.ended.finishedAt or "").encode()):
            time = known[0] / 1e9
        yield _failure(part, process, _KILLED if full else code, time, full=full)


def _failure(part: HostPlan, process: Process, status: int, time: float, *, full: bool) -> Failure:
    killed = signal_name(status - SIGNALLED)
    code = None if killed else status
    return process_failure(part, process, time, code=code, signal=killed, memory_full=full)


def _hint(first: Failure, keys: Kubernetes) -> str:
    if not first.out_of_memory:
        return first.hint
    remedy = (
        "the pod may use only the memory that it asks for: raise memory in"
        " cluster.kubernetes.resources"
        if "memory" in keys.resources
        else "set memory in cluster.kubernetes.resources: Kubernetes then chooses a machine that"
        " has it free"
    )
    return f"{remedy}\n{first.hint}".rstrip()
