"""What is known of a job, without a server."""

from __future__ import annotations

import os
import stat
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dtrain.engines.kubernetes import host_states
from dtrain.engines.kubernetes.ending import KubernetesEnding, PodEnding
from dtrain.engines.kubernetes.job import FollowedPod, KubernetesJob
from dtrain.engines.kubernetes.objects import KubernetesJobState, Pod, Terminated
from dtrain.engines.kubernetes.output import LogPositions
from dtrain.engines.kubernetes.reading import PodLines
from dtrain.engines.kubernetes.watcher import WatcherSaid
from dtrain.launchplan.build import build
from dtrain.messages.agent import ProgressReport
from dtrain.runs import events
from dtrain.runs.folder import RunFolder
from dtrain.runs.journal import JournalReader
from dtrain.runs.record import Record
from dtrain.runs.request import Request
from dtrain.runs.shown_state import ShownState
from dtrain.runs.storage import StorageError
from dtrain.session.caller import Caller
from dtrain.spec.load import parse

FILE = """
cluster: {kubernetes: {image: i, queue: gpu}, nodes: 2, slots: 1}
job: {framework: none, command: [x]}
"""
BEGINS = b"[dtrain] begins\n"
RUNS, HELD, FAILED = (
    KubernetesJobState("u", 1),
    KubernetesJobState("u", 1, suspended=True),
    KubernetesJobState("u", 1, failed="BackoffLimitExceeded"),
)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KubernetesJob:
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    return job_of(FILE)


def job_of(file: str) -> KubernetesJob:
    record = Record("run-1", Request("c.yaml", "/", file), 29500, "python3", 1e9)
    return KubernetesJob(record, RunFolder.create("run-1"), Caller(), {})


def pod(uid: str, index: int = 0, created: str = "10:00") -> Pod:
    state = ShownState.RUNNING
    return Pod(f"pod-{uid}", uid, index, 1, "m", "Running", state, created=created, running=True)


def killed(job: KubernetesJob, uid: str, index: int, reason: str, at: str | None) -> None:
    ended = Terminated(137, reason, finishedAt=at)
    job.pod_seen(replace(pod(uid, index), ended=ended, state=ShownState.ENDED))


def ends(job: KubernetesJob, uid: str, status: int, process: str = "worker-0") -> None:
    line = f"[dtrain] {process} ended: {status} at 5.0\n".encode()
    job.keep(PodLines(uid, (BEGINS, line), 5, 1, 5))


def journaled(job: KubernetesJob, kind: type) -> list[Any]:
    found = JournalReader(job.folder.journal).read()
    return [event for _, event in found if isinstance(event, kind)]


def notices(job: KubernetesJob) -> list[str]:
    return [event.text for event in journaled(job, events.NoticeShown)]


def blamed(job: KubernetesJob) -> list[tuple[str, int | None]]:
    return [(failure.host, failure.code) for failure in job.ended("").failures]


def test_pods_from_before_a_suspension_are_not_blamed(job: KubernetesJob) -> None:
    job.job_seen(RUNS, "")
    for index, uid in enumerate("ab"):
        job.pod_seen(pod(uid, index))
        ends(job, uid, 3, f"worker-{index}")
    job.pod_seen(pod("a"), removed=True)
    job.job_seen(HELD, "Preempted: for 7 others")
    job.pod_seen(pod("b", 1), removed=True)
    assert blamed(job) == []
    job.job_seen(None, "")
    assert job.ended("").reason == "c-1 was deleted outside dtrain"
    job.job_seen(RUNS, "")
    job.pod_seen(pod("c", 1, created="10:05"))
    ends(job, "c", 9, "worker-1")
    job.job_seen(FAILED, "")
    assert blamed(job) == [("node1", 9)]


def test_how_to_reach_a_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    job = job_of(FILE.replace("[x]", "[x], env: {DTRAIN_TENSORBOARD: '1'}"))
    job.change(namespace="ml", context="prod")
    job.pod_seen(pod("a"))
    for port in ("6006", 80, 6006, 6007):
        said = {"event": "tensorboard", "port": port}
        job.watcher_event(WatcherSaid("a", ProgressReport("x.progress", 1, said)))
    command = "kubectl port-forward pod/pod-a 6006 --namespace ml --context prod"
    assert notices(job) == [f"TensorBoard of node0: http://127.0.0.1:6006/ while `{command}` runs"]


class ConnectedWatcher:
    def __init__(self, known: FollowedPod) -> None:
        self._over = known.over

    @property
    def reachable(self) -> bool:
        return not self._over.is_set()

    def send(self, order: object) -> None:
        """It does not answer."""


class TestHangs:
    @pytest.fixture
    def job(
        self, job: KubernetesJob, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> KubernetesJob:
        monkeypatch.setenv("DTRAIN_HOME", str(tmp_path / "watched"))
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        job = job_of(FILE.replace("[x]", "[x], watchdog: {silence: 60s}"))
        job.job_seen(RUNS, "")
        return job

    def begins(self, job: KubernetesJob, pod: Pod) -> None:
        known = job.pod_seen(pod)
        if known is not None and not pod.over:
            watcher: Any = ConnectedWatcher(known)
            job.watched(known, watcher)

    def is_found(self, job: KubernetesJob) -> bool:
        """Whether two minutes without a report are a hang."""
        for _ in range(24):
            self.now += 5
            job.watch.look()
        return any("collecting stacks" in text for text in notices(job))

    def test_a_job_that_waits_in_its_queue(self, job: KubernetesJob) -> None:
        self.begins(job, pod("a"))
        self.begins(job, pod("b", 1))
        job.job_seen(HELD, "")
        assert not self.is_found(job)  # its pods have job.grace
        for index, uid in enumerate("ab"):
            killed(job, uid, index, "Error", None)
        assert not self.is_found(job)
        job.job_seen(RUNS, "")
        self.begins(job, pod("c", created="10:05"))
        assert not self.is_found(job)  # it may wait for the other one
        self.begins(job, pod("d", 1, created="10:05"))
        assert self.is_found(job)

    def test_pods_that_have_ended(self, job: KubernetesJob) -> None:
        """The job may go on because of a sidecar."""
        done = {"ended": Terminated(0, "Completed"), "state": ShownState.ENDED}
        self.begins(job, replace(pod("a"), **done))  # before an attach
        self.begins(job, pod("b", 1))
        job.pod_seen(replace(pod("b", 1), **done))
        assert not self.is_found(job)

    def test_one_pod_is_left(self, job: KubernetesJob) -> None:
        """The other one ended before an attach."""
        done = {"ended": Terminated(0, "Completed"), "state": ShownState.ENDED}
        self.begins(job, replace(pod("a"), **done))
        self.begins(job, pod("b", 1))
        assert self.is_found(job)


def test_the_last_pod_of_an_index_counts_in_any_order(job: KubernetesJob) -> None:
    new, old = pod("new", created="10:05"), pod("old", created="10:00")
    job.job_seen(FAILED, "")
    for known in job.listed((new, old)):
        ends(job, known.pod.uid, {"new": 9, "old": 3}[known.pod.uid])
    assert blamed(job) == [("node0", 9)]


@pytest.mark.parametrize(
    ("at", "first"),
    [("1970-01-01T00:00:04Z", "node1"), ("1970-01-01T00:00:06Z", "node0"), (None, "node0")],
)
def test_a_killed_container_has_ended_when_the_kubelet_says(
    job: KubernetesJob, at: str | None, first: str
) -> None:
    """The process on the other host ends at second 5."""
    job.job_seen(FAILED, "")
    job.pod_seen(pod("a"))
    ends(job, "a", 1)
    killed(job, "b", 1, "OOMKilled", at)
    assert next(host for host, _ in blamed(job)) == first


def test_a_suspension_shows_with_its_reason(job: KubernetesJob) -> None:
    job.job_seen(HELD, "")
    job.job_seen(HELD, "Pending: 7 more GPUs needed")
    job.job_seen(HELD, "Pending: 12 more GPUs needed")
    job.job_seen(RUNS, "")
    job.pod_seen(pod("a"))
    job.job_seen(HELD, "Preempted: x")
    job.pod_seen(pod("a"), removed=True)
    job.job_seen(HELD, "Preempted: x")
    job.job_seen(RUNS, "")
    job.pod_seen(pod("b", created="10:05"))
    job.pod_seen(pod("a"), removed=True)
    job.job_seen(HELD, "Preempted: x")
    assert notices(job) == [
        "c-1 waits in the queue gpu",
        "c-1 waits in the queue gpu: Pending: 7 more GPUs needed",
        "c-1 has left the queue gpu",
        "c-1 is suspended and waits in the queue gpu: Preempted: x",
        "c-1 has left the queue gpu",
        "c-1 is suspended and waits in the queue gpu: Preempted: x",
    ]
    states = [
        (event.state, event.detail)
        for event in journaled(job, events.HostState)
        if event.host == "node0"
    ]
    waits = "waits in the queue gpu"
    assert states == [
        (ShownState.QUEUED, waits),
        (ShownState.QUEUED, f"{waits}: Pending: 7 more GPUs needed"),
        (ShownState.QUEUED, ""),
        (ShownState.RUNNING, ""),
        (ShownState.ENDED, ""),
        (ShownState.QUEUED, f"{waits}: Preempted: x"),
        (ShownState.QUEUED, ""),
        (ShownState.RUNNING, ""),
    ]


def test_a_pod_that_ends_just_after_a_suspension_is_blamed(job: KubernetesJob) -> None:
    """The server has not yet said that the job runs again."""
    job.job_seen(RUNS, "")
    job.pod_seen(pod("a"))
    job.job_seen(HELD, "")
    job.listed(())
    job.pod_seen(pod("b", created="10:05"))
    ends(job, "b", 9)
    job.pod_seen(pod("b", created="10:05"), removed=True)
    job.job_seen(FAILED, "")
    assert blamed(job) == [("node0", 9)]


def test_pods_that_a_watch_has_missed_are_gone(job: KubernetesJob) -> None:
    job.job_seen(RUNS, "")
    job.listed((pod("a"), pod("b", 1)))
    job.listed((pod("b", 1),))
    shown = [(event.host, event.state) for event in journaled(job, events.HostState)]
    assert shown[-1] == ("node0", ShownState.ENDED)


def test_many_pods_that_wait_for_the_same_say_so_once(job: KubernetesJob) -> None:
    """The scheduler counts the machines anew after each change of the cluster."""
    job.job_seen(RUNS, "")
    waits = Pod("pod-a", "a", 0, 1, "", "Pending", ShownState.QUEUED, "not scheduled yet")
    counts = [f"Unschedulable: 0/{count} nodes are available" for count in (100, 99)]
    for detail in (waits.detail, *counts):
        for index, uid in enumerate("ab"):
            job.pod_seen(replace(waits, uid=uid, index=index, detail=detail))
    assert notices(job) == ["node0 waits: not scheduled yet", f"node0 waits: {counts[0]}"]
    shown = [event.detail for event in journaled(job, events.HostState) if event.host == "node1"]
    assert shown == ["", "not scheduled yet", *counts]


def test_a_pod_that_does_not_start_gets_its_reason_from_events(
    job: KubernetesJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_states, "SLOW_SECONDS", -1.0)
    waits = replace(pod("a"), running=False, state=ShownState.PREPARING)
    job.pod_seen(waits)
    assert job.hosts.slow_pod == "pod-a"
    job.hosts.warned("FailedMount: timed out", "pod-a")
    assert notices(job) == ["node0 waits: FailedMount: timed out"]
    job.pod_seen(pod("a"))
    assert job.hosts.slow_pod == ""
    job.hosts.warned("FailedMount: timed out", "pod-a")
    job.pod_seen(replace(waits, uid="b", name="pod-b", created="10:05"))
    job.pod_seen(pod("c", created="10:06"))
    job.hosts.warned("FailedMount: timed out", "pod-b")
    assert job.hosts.slow_pod == ""
    assert journaled(job, events.HostState)[-1].state == ShownState.RUNNING


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ("", "with job.restart.max: 3, Kubernetes starts all pods again after such an end"),
        ("restart: {max: 2}", "all 2 restarts of job.restart.max are used"),
        ("api", "the TrainingRuntime decides whether Kubernetes starts all pods again"),
    ],
)
def test_the_hint_for_an_evicted_pod(changes: str, hint: str) -> None:
    text = FILE.replace("queue: gpu", "queue: gpu, api: trainjob") if changes == "api" else FILE
    text = text if changes == "api" else text.replace("[x]", f"[x], {changes}")
    evicted = PodEnding(replace(pod("a"), disrupted="Evicted"), (), ())
    ending = KubernetesEnding("c-1", FAILED, build(parse(text, "c.yaml")), [evicted], ())
    assert ending.report().hint == hint


def test_what_ends_with_an_evicted_pod_is_not_blamed(job: KubernetesJob) -> None:
    """Kubernetes deletes the other pods."""
    job.job_seen(RUNS, "")
    job.pod_seen(replace(pod("a"), disrupted="Evicted", state=ShownState.ENDED))
    job.pod_seen(pod("b", 1))
    end = b"[dtrain] worker-1 ended: 143 at 5.0\n"
    job.keep(PodLines("b", (BEGINS, b"[dtrain] TERM\n", end), 5, 1, 5))
    job.job_seen(FAILED, "")
    report = job.ended("")
    assert report.problems == ("Evicted",)
    assert report.failures == ()


@pytest.mark.parametrize(
    ("resources", "hint"),
    [
        ("", "set memory in cluster.kubernetes.resources: Kubernetes then chooses a machine"),
        ("resources: {memory: 1Gi}, ", "the pod may use only the memory that it asks for"),
    ],
)
def test_the_hint_for_a_full_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resources: str, hint: str
) -> None:
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    job = job_of(FILE.replace("queue: gpu", f"{resources}queue: gpu"))
    job.job_seen(FAILED, "")
    killed(job, "a", 0, "OOMKilled", None)
    assert job.ended("").hint.startswith(hint)


def test_a_message_of_a_kubelet_is_shown_once(job: KubernetesJob) -> None:
    job.pod_seen(pod("a"))
    for _ in range(2):
        job.log_problem("a", "too many open files")
    assert notices(job) == ["node0: the log of pod pod-a: too many open files"]


@pytest.mark.parametrize("ended", [True, False])
def test_a_log_without_its_last_line_may_lack_more(job: KubernetesJob, ended: bool) -> None:
    job.pod_seen(pod("a"))
    ends(job, "a", 0)
    if ended:
        job.keep(PodLines("a", (b"[dtrain] ends\n",), 6, 1, 6))
    job.log_ended("a", whole=False)
    missing = "node0: the last lines of the output may be missing"
    assert [text.startswith(missing) for text in notices(job)] == [True] * (not ended)


def test_a_pod_that_the_kubelet_has_refused_has_no_log(job: KubernetesJob) -> None:
    job.pod_seen(replace(pod("a"), running=False, phase="Failed", state=ShownState.ENDED))
    job.log_ended("a", whole=False)
    assert notices(job) == []


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (143, "c-1 was deleted outside dtrain"),
        (9, "rank 0 on node0 exited with status 9"),
    ],
)
def test_processes_that_a_deletion_has_ended_are_no_cause(
    job: KubernetesJob, status: int, reason: str
) -> None:
    job.pod_seen(pod("a"))
    ends(job, "a", status)
    job.job_seen(None, "")
    assert job.ended("").reason == reason


def test_a_pod_that_somebody_deletes_is_the_cause_and_not_the_signal(job: KubernetesJob) -> None:
    job.job_seen(RUNS, "")
    for index, uid in enumerate("ab"):
        job.pod_seen(pod(uid, index))
    job.pod_seen(replace(pod("b", 1), deleted=10.0))
    # The Job controller deletes the other pod because of it, and that one is faster.
    job.pod_seen(replace(pod("a"), deleted=11.0))
    ends(job, "a", 143)
    ends(job, "b", 143, "worker-1")
    job.job_seen(FAILED, "")
    assert job.ended("").reason == "node1: pod pod-b was deleted outside dtrain"


def test_pods_that_a_failure_has_deleted_are_not_the_cause(job: KubernetesJob) -> None:
    job.job_seen(RUNS, "")
    for index, uid in enumerate("ab"):
        job.pod_seen(pod(uid, index))
    deleted, failed = replace(pod("a"), deleted=10.0), Terminated(9)
    # A list has no order of time.
    job.listed((deleted, replace(pod("b", 1), ended=failed, state=ShownState.ENDED)))
    ends(job, "b", 9, "worker-1")
    job.job_seen(FAILED, "")
    assert job.ended("").reason == "rank 1 on node1 exited with status 9"


def test_a_process_that_ended_because_of_another_failure_is_not_blamed(job: KubernetesJob) -> None:
    """torchrun ends with status 1 after TERM. The clock of its machine is behind."""
    job.job_seen(RUNS, "")
    for index, uid in enumerate("ab"):
        job.pod_seen(pod(uid, index))
    ends(job, "b", 9, "worker-1")
    end = b"[dtrain] worker-0 ended: 1 at 3.0\n"
    job.keep(PodLines("a", (BEGINS, b"[dtrain] TERM\n", end), 5, 1, 5))
    job.job_seen(FAILED, "")
    assert blamed(job) == [("node1", 9)]


def test_a_pod_that_is_deleted_after_its_end_is_not_the_cause(job: KubernetesJob) -> None:
    job.job_seen(RUNS, "")
    for index, uid in enumerate("ab"):
        job.pod_seen(pod(uid, index))
    finished = replace(pod("a"), ended=Terminated(0), phase="Succeeded", state=ShownState.ENDED)
    job.pod_seen(finished)
    job.pod_seen(replace(finished, deleted=10.0), removed=True)
    ends(job, "b", 9, "worker-1")
    job.job_seen(FAILED, "")
    assert job.ended("").reason == "rank 1 on node1 exited with status 9"


@pytest.mark.parametrize(
    ("failed", "others_deleted", "term", "first"),
    [
        ("b", False, False, True),
        # torchrun ends with status 1 after TERM.
        ("b", False, True, False),
        # Somebody has deleted the job.
        ("a", True, False, True),
        ("a", True, True, False),
        # It fails because the other one is gone.
        ("a", False, False, False),
    ],
)
@pytest.mark.parametrize("at", [9.0, 11.0])
@pytest.mark.parametrize("job_is_gone", [True, False])
def test_what_was_first_a_failure_or_a_deletion(
    job: KubernetesJob,
    failed: str,
    others_deleted: bool,
    term: bool,
    first: bool,
    at: float,
    job_is_gone: bool,
) -> None:
    """The log is read late, and the clocks differ."""
    job.job_seen(RUNS, "")
    for index, uid in enumerate("ab"):
        job.pod_seen(pod(uid, index))
    job.pod_seen(replace(pod("b", 1), deleted=10.0))
    if others_deleted:
        job.pod_seen(replace(pod("a"), deleted=10.0))
    index = "ab".index(failed)
    end = b"[dtrain] worker-%d ended: 1 at %.1f\n" % (index, at)
    terms = [b"[dtrain] TERM\n"]
    lines = (BEGINS, *terms, end) if term else (BEGINS, end, *terms)
    job.keep(PodLines(failed, lines, 5, 1, 5))
    job.job_seen(None if job_is_gone else FAILED, "")
    report = job.ended("")
    by_process = f"rank {index} on node{index} exited with status 1"
    deleted = "c-1" if job_is_gone else "node1: pod pod-b"
    assert report.reason == (by_process if first else f"{deleted} was deleted outside dtrain")
    assert [one.summary for one in report.failures] == [by_process]


def test_a_deletion_that_the_log_reports_before_the_server(job: KubernetesJob) -> None:
    job.job_seen(RUNS, "")
    job.pod_seen(pod("a"))
    job.keep(PodLines("a", (BEGINS, b"[dtrain] TERM\n"), 4, 1, 4))
    ends(job, "a", 143)
    job.pod_seen(replace(pod("a"), deleted=10.0))
    job.job_seen(FAILED, "")
    assert job.ended("").reason == "node0: pod pod-a was deleted outside dtrain"


def test_a_process_that_attaches_knows_what_was_first(job: KubernetesJob) -> None:
    job.pod_seen(pod("a"))
    job.keep(PodLines("a", (BEGINS, b"[dtrain] TERM\n"), 5, 1, 5))
    job.leave()
    attached = followed_again(job)
    attached.job_seen(RUNS, "")
    attached.pod_seen(replace(pod("a"), deleted=10.0))
    ends(attached, "a", 1)
    attached.job_seen(FAILED, "")
    assert attached.ended("").reason == "node0: pod pod-a was deleted outside dtrain"


def test_a_pod_that_is_deleted_before_it_starts_is_the_cause(job: KubernetesJob) -> None:
    """The other one waits for it in vain."""
    job.job_seen(RUNS, "")
    job.pod_seen(pod("a"))
    waits = replace(pod("b", 1), state=ShownState.PREPARING, phase="Pending", running=False)
    job.pod_seen(replace(waits, deleted=3.0))
    ends(job, "a", 1)
    job.job_seen(FAILED, "")
    assert job.ended("").reason == "node1: pod pod-b was deleted outside dtrain"


def test_a_pod_that_is_deleted_in_the_second_of_its_failure_has_failed(job: KubernetesJob) -> None:
    """dtrain deletes the job if a sidecar goes on."""
    job.job_seen(RUNS, "")
    job.pod_seen(pod("a"))
    ended = replace(pod("a"), ended=Terminated(9), state=ShownState.ENDED, sidecar="proxy")
    job.pod_seen(ended)
    job.keep(PodLines("a", (BEGINS, b"[dtrain] worker-0 ended: 9 at 10.3\n"), 5, 1, 5))
    job.pod_seen(replace(ended, deleted=10.0))
    job.job_seen(None, "")
    assert job.ended("").reason == "rank 0 on node0 exited with status 9"


@pytest.mark.parametrize("last", [0, 143])
def test_a_job_that_is_gone_after_its_last_process_is_done(job: KubernetesJob, last: int) -> None:
    """An administrator's program deletes it while the server does not answer dtrain."""
    job.job_seen(RUNS, "")
    for index, uid in enumerate("ab"):
        job.pod_seen(pod(uid, index))
        ended = Terminated(last if index else 0)
        job.pod_seen(replace(pod(uid, index), ended=ended, state=ShownState.ENDED))
    job.job_seen(None, "")
    assert job.ended("").ok == (last == 0)


def test_why_kubernetes_has_deleted_a_pod(job: KubernetesJob) -> None:
    job.job_seen(RUNS, "")
    job.pod_seen(pod("a"))
    job.pod_seen(replace(pod("a"), deleted=10.0))
    job.job_seen(KubernetesJobState("u", 1, failed="DeadlineExceeded: active longer"), "")
    assert job.ended("").problems == ("DeadlineExceeded: active longer",)


def test_a_pod_that_is_gone_at_once_was_deleted(job: KubernetesJob) -> None:
    """With `kubectl delete --force`."""
    job.job_seen(RUNS, "")
    job.pod_seen(pod("a"))
    job.pod_seen(pod("a"), removed=True)
    job.job_seen(FAILED, "")
    assert job.ended("").reason == "node0: pod pod-a was deleted outside dtrain"


def followed_again(job: KubernetesJob) -> KubernetesJob:
    """The job as another process follows it."""
    return KubernetesJob(job.record, job.folder, Caller(), {})


def test_the_cause_is_known_to_a_process_that_attaches_after_it(job: KubernetesJob) -> None:
    job.pod_seen(pod("a"))
    ends(job, "a", 9)
    job.leave()
    attached = followed_again(job)
    attached.pod_seen(pod("a"))
    attached.job_seen(FAILED, "")
    assert blamed(attached) == [("node0", 9)]


def test_a_crash_of_the_machine_leaves_no_empty_file(
    job: KubernetesJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then no process could follow the run any more."""
    file = job.folder.path / "pods.json"
    written: list[int] = []

    def fsync(fd: int) -> None:
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            assert not file.exists(), "it is complete before it has its name"
            written.append(os.fstat(fd).st_size)

    monkeypatch.setattr(os, "fsync", fsync)
    LogPositions(job.folder.path).save()
    assert written == [file.stat().st_size]


def test_lines_after_a_gap_follow_those_that_are_stored(job: KubernetesJob) -> None:
    """A killed launcher may have stored more lines than the positions say."""
    job.pod_seen(pod("a"))
    job.leave()
    job.keep(PodLines("a", (b"[worker-0] stored\n",), 5, 1, 5))
    attached = followed_again(job)
    attached.pod_seen(pod("a"))
    attached.keep(PodLines("a", (b"[worker-0] new\n",), 9, 1, 9, gap=True))
    assert stored(job, "out") == "stored\nnew\n"


def test_printed_steps_are_journaled_and_those_of_an_attempt_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    progress = "progress: {line: 'step {step} of {total}'}, restart: {max: 1}}"
    job = job_of(FILE.replace("command: [x]}", f"command: [x], {progress}"))
    job.pod_seen(pod("a"))
    lines = (BEGINS, *(b"[worker-0] step %d of 9\n" % step for step in (1, 2)))
    job.keep(PodLines("a", lines, 5, 1, 5))
    job.keep(PodLines("a", (b"[worker-0] step 3 of 9\n",), 6, 1, 6))
    job.begin_next_attempt()
    job.pod_seen(replace(pod("b"), attempt=2))
    job.keep(PodLines("b", (BEGINS, b"[worker-0] step 7 of 9\n"), 5, 1, 5))
    job.leave()
    assert [found.report.step for found in journaled(job, events.Progressed)] == [2, 3, 7]
    assert [found.attempt.step for found in journaled(job, events.AttemptFailed)] == [3]


def stored(job: KubernetesJob, stream: str) -> str:
    return (job.folder.logs / "node0" / f"worker-0.{stream}").read_text()


def test_a_line_in_pieces_is_stored_as_one(job: KubernetesJob) -> None:
    job.pod_seen(pod("a"))
    pieces = (BEGINS, b"[worker-0+] a\n", b"[worker-0 err] c\n", b"[worker-0+]  b\n")
    job.keep(PodLines("a", pieces, 5, 1, 5))
    job.leave()
    attached = followed_again(job)
    attached.pod_seen(pod("a"))
    attached.keep(PodLines("a", (b"[worker-0] \n", b"[worker-0] d\n"), 6, 1, 6))
    assert stored(job, "out") == "a b\nd\n"
    assert stored(job, "err") == "c\n"


@pytest.mark.parametrize("at_once", [True, False])
def test_the_script_writes_lines_of_its_own(job: KubernetesJob, at_once: bool) -> None:
    """Not into a long line of the process whose stream has them."""
    job.pod_seen(pod("a"))
    lines = [BEGINS, b"[worker-0 err+] a\n", b"bash: killed\n", b"[worker-0 err] b\n"]
    for then, some in enumerate([lines] if at_once else [[line] for line in lines]):
        job.keep(PodLines("a", tuple(some), then, 1, then))
    assert stored(job, "err") == "a\nbash: killed\nb\n"


def test_a_line_whose_end_is_missing_ends_before_the_next_one(job: KubernetesJob) -> None:
    job.pod_seen(pod("a"))
    job.keep(PodLines("a", (BEGINS, b"[worker-0+] a\n"), 5, 1, 5))
    job.keep(PodLines("a", (b"[worker-0] b\n",), 9, 1, 9, gap=True))
    assert stored(job, "out") == "a\nb\n"


@pytest.mark.parametrize(
    ("lines", "gap", "missing"),
    [
        ([b"[worker-0] 9\n"], False, True),
        ([BEGINS, b"[worker-0] 1\n"], False, False),
        ([b"exec /bin/bash: exec format error\n"], False, False),
        ([b"[worker-0] 9\n"], True, True),
        ([BEGINS, b"[worker-0] 1\n"], True, False),
    ],
)
def test_a_log_begins_with_the_line_of_its_script(
    job: KubernetesJob, lines: list[bytes], gap: bool, missing: bool
) -> None:
    """Also the log of a container that was started again, which lacks the known lines."""
    job.pod_seen(pod("a"))
    if gap:
        ends(job, "a", 1)
    job.keep(PodLines("a", tuple(lines), 9, 1, 9, gap=gap))
    found = [text.partition(" in the output")[0] for text in notices(job)]
    assert found == ["node0: lines are missing"] * missing


def test_the_status_of_a_pod_whose_log_cannot_be_read(job: KubernetesJob) -> None:
    ended = replace(pod("a", 1), ended=Terminated(7, "Error"), state=ShownState.ENDED)
    job.pod_seen(ended)
    job.job_seen(FAILED, "")
    assert job.ended("").problems == ("node1 exited with status 7: Error",)


RAISED = """\
Traceback (most recent call last):
  File "t.py", line 3, in <module>
ValueError: bad batch
"""
ECHO = """\
[rank0]: Traceback (most recent call last):
[rank0]: RuntimeError: Connection closed by peer [10.0.0.2]:2000
"""
SUMMARY = """\
Traceback (most recent call last):
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
Root Cause (first observed failure):
[0]:
  rank      : 1 (local_rank: 0)
  exitcode  : %d (pid: 7)
"""
NUMBERED = "".join(f"[rank1]: {line}\n" for line in RAISED.splitlines())


@pytest.mark.parametrize(
    ("stderr", "code", "message"),
    [
        (RAISED + SUMMARY, 1, "ValueError: bad batch"),
        (NUMBERED + ECHO + SUMMARY, 1, "ValueError: bad batch"),
        (ECHO + SUMMARY, 1, ""),
        (SUMMARY, 3, ""),
        (RAISED + SUMMARY, -11, ""),
    ],
    ids=["without a number", "of its own", "of another", "silent", "killed"],
)
def test_the_traceback_of_a_rank_is_in_the_output_of_its_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stderr: str, code: int, message: str
) -> None:
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    program = "framework: torch, script: t.py, rendezvous: {backend: static}"
    job = job_of(FILE.replace("framework: none, command: [x]", program))
    lines = [f"[torchrun-1 err] {line}\n".encode() for line in (stderr % code).splitlines()]
    end = b"[dtrain] torchrun-1 ended: 1 at 5.0\n"
    job.pod_seen(pod("a", 1))
    job.keep(PodLines("a", (BEGINS, *lines, end), 5, 1, 5))
    job.job_seen(FAILED, "")
    (failure,) = job.ended("").failures
    assert (failure.rank, failure.message, failure.is_echo) == (1, message, False)


@pytest.mark.parametrize(
    ("finished", "said", "early"),
    [
        (4.0, "RuntimeError: Connection closed by peer", True),
        (6.0, "RuntimeError: Connection closed by peer", False),
        (4.0, "ValueError: bad batch", False),
    ],
)
def test_a_rank_that_ended_early_is_named_if_others_lose_their_connection_to_it(
    job: KubernetesJob, finished: float, said: str, *, early: bool
) -> None:
    for index, uid in enumerate("ab"):
        job.pod_seen(pod(uid, index))
    done = f"[dtrain] worker-0 ended: 0 at {finished}\n".encode()
    job.keep(PodLines("a", (BEGINS, done), 5, 1, 5))
    lost = f"[worker-1 err] {said}\n".encode()
    failed = b"[dtrain] worker-1 ended: 1 at 5.0\n"
    job.keep(PodLines("b", (BEGINS, lost, failed), 5, 1, 5))
    job.job_seen(FAILED, "")
    report = job.ended("")
    assert report.reason == "rank 1 on node1 exited with status 1"
    named = ("rank 0 on node0 had already ended, with status 0",)
    assert report.problems == (named if early else ())
    assert ("the same number of steps" in report.hint) is early


def test_the_first_end_of_a_container_counts(job: KubernetesJob) -> None:
    """The script does not run again in the same pod."""
    again = replace(pod("a", 1), again=True, state=ShownState.ENDED)
    job.pod_seen(replace(again, ended=Terminated(137, "OOMKilled")))
    job.pod_seen(replace(again, ended=Terminated(1, "Error")))
    assert job.why_endless() == "", "the deletion of the job deletes the log"
    job.log_ended("a", whole=True)
    assert job.why_endless().startswith("node1: Kubernetes has started the failed container again")
    job.job_seen(None, "")
    report = job.ended("")
    assert [failure.out_of_memory for failure in report.failures] == [True]
    assert "deleted outside" not in report.reason


def test_lines_of_which_some_cannot_be_stored_are_stored_once(job: KubernetesJob) -> None:
    job.pod_seen(pod("a"))
    lines = PodLines("a", (BEGINS, b"[worker-0] out\n", b"[worker-0 err] err\n"), 5, 1, 5)
    folder = job.folder.logs / "node0"
    error = folder / "worker-0.err"
    error.unlink()
    error.mkdir()
    with pytest.raises(StorageError):
        job.keep(lines)
    error.rmdir()
    error.touch()
    job.keep(lines)
    assert (folder / "worker-0.out").read_bytes() == b"out\n"
    assert error.read_bytes() == b"err\n"
