"""What is known of a job, and what the thread that follows it does, without a server."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dtrain.diagnostics import ConnectError, ExitCode
from dtrain.engines.kubernetes import follow, host_states, launched
from dtrain.engines.kubernetes.client import AbsentError, ConflictError
from dtrain.engines.kubernetes.ending import KubernetesEnding, PodEnding
from dtrain.engines.kubernetes.follow import KubernetesFollower
from dtrain.engines.kubernetes.job import KubernetesJob
from dtrain.engines.kubernetes.objects import INDEX_LABEL, KubernetesJobState, Pod, Terminated
from dtrain.engines.kubernetes.reading import JobSeen, LogEnded, PodLines, PodsListed
from dtrain.failures.cause import Report
from dtrain.launchplan.build import build
from dtrain.runs import events
from dtrain.runs.folder import RunFolder
from dtrain.runs.journal import JournalReader
from dtrain.runs.record import Record
from dtrain.runs.request import Request
from dtrain.runs.shown_state import ShownState
from dtrain.runs.storage import StorageError
from dtrain.session import recorder
from dtrain.session.caller import Caller
from dtrain.session.control import Control
from dtrain.spec.load import parse
from support.limits import HANG, until

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
    folder = RunFolder.create("run-1")
    record = Record("run-1", Request("c.yaml", "/", FILE), 29500, "python3", 1e9)
    return KubernetesJob(record, folder, Caller(), {})


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


def test_a_message_of_a_kubelet_is_shown_once(job: KubernetesJob) -> None:
    job.pod_seen(pod("a"))
    for _ in range(2):
        job.log_problem("a", "too many open files")
    assert notices(job) == ["node0: the log of pod pod-a: too many open files"]


@pytest.mark.parametrize("ended", [True, False])
def test_a_log_without_its_last_line_may_lack_more(job: KubernetesJob, ended: bool) -> None:
    job.pod_seen(pod("a"))
    if ended:
        ends(job, "a", 143)
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
    ("failed", "at", "first"),
    [
        # The other pod is deleted at second 10, and the watch reports both later.
        ("a", 9.9, True),
        ("a", 10.9, True),
        ("a", 11.1, False),
        # torchrun ends with status 1 after TERM.
        ("b", 9.9, True),
        ("b", 10.1, False),
    ],
)
@pytest.mark.parametrize("job_is_gone", [True, False])
def test_what_was_first_a_failure_or_a_deletion(
    job: KubernetesJob, failed: str, at: float, first: bool, job_is_gone: bool
) -> None:
    job.job_seen(RUNS, "")
    for index, uid in enumerate("ab"):
        job.pod_seen(pod(uid, index))
    job.pod_seen(replace(pod("b", 1), deleted=10.0))
    index = "ab".index(failed)
    line = f"[dtrain] worker-{index} ended: 1 at {at}\n".encode()
    job.keep(PodLines(failed, (BEGINS, line), 5, 1, 5))
    job.job_seen(None if job_is_gone else FAILED, "")
    report = job.ended("")
    by_process = f"rank {index} on node{index} exited with status 1"
    deleted = "c-1" if job_is_gone else "node1: pod pod-b"
    assert report.reason == (by_process if first else f"{deleted} was deleted outside dtrain")
    assert [one.summary for one in report.failures] == [by_process]


@pytest.mark.parametrize(("failed", "at"), [("a", 21.4), ("b", 20.4), ("a", 19.9), ("b", 19.9)])
@pytest.mark.parametrize("server", [10.0, 30.0])
def test_the_clock_of_the_server_may_differ_from_that_of_the_machines(
    job: KubernetesJob, failed: str, at: float, server: float
) -> None:
    """The deleted pod's script has written when the kubelet ended it."""
    job.job_seen(RUNS, "")
    for index, uid in enumerate("ab"):
        job.pod_seen(pod(uid, index))
    job.pod_seen(replace(pod("b", 1), deleted=server))
    job.keep(PodLines("b", (BEGINS, b"[dtrain] TERM at 20.25\n"), 5, 1, 5))
    index = "ab".index(failed)
    line = f"[dtrain] worker-{index} ended: 1 at {at}\n".encode()
    job.keep(PodLines(failed, (line,), 6, 1, 6))
    job.job_seen(FAILED, "")
    by_deletion = job.ended("").reason == "node1: pod pod-b was deleted outside dtrain"
    assert by_deletion == (at > 20.25)


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


def test_lines_after_a_gap_follow_those_that_are_stored(job: KubernetesJob) -> None:
    """A killed launcher may have stored more lines than the positions say."""
    job.pod_seen(pod("a"))
    job.leave()
    job.keep(PodLines("a", (b"[worker-0] stored\n",), 5, 1, 5))
    attached = followed_again(job)
    attached.pod_seen(pod("a"))
    attached.keep(PodLines("a", (b"[worker-0] new\n",), 9, 1, 9, gap=True))
    log = job.folder.logs / "node0" / "worker-0.out"
    assert log.read_text() == "stored\nnew\n"


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


def test_a_full_disk_does_not_hide_the_report(
    job: KubernetesJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full() -> None:
        raise StorageError("no space left on device")

    monkeypatch.setattr(job._positions, "save", full)
    report = job.finish(job.ended("Ctrl-C"))
    assert report.exit_code is ExitCode.INTERRUPTED
    assert [event.report.reason for event in journaled(job, events.Finished)] == ["Ctrl-C"]


# Following ---------------------------------------------------------------------------------------

Answer = Callable[[str, str], dict[str, Any]]


class Server:
    """Answers requests with a function."""

    namespace, host, context = "ml", "10.0.0.1", "prod"

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def request(self, method: str, path: str, body: Any = None, **_: Any) -> dict[str, Any]:
        return self._answer(method, path)

    def stream(self, path: str, **_: Any) -> Any:
        raise ConnectError(self.host, "GET", "connection refused")


def absent(method: str, path: str) -> dict[str, Any]:
    raise AbsentError("10.0.0.1", f"{method} {path}", "not found")


def follower(
    job: KubernetesJob, answer: Answer, control: Control | None = None
) -> KubernetesFollower:
    client: Any = Server(answer)
    return KubernetesFollower(job, client, control or Control())


def report_after_ctrl_c(job: KubernetesJob, answer: Answer, control: Control) -> Report:
    followed = follower(job, answer, control)
    control.stop("Ctrl-C")
    report = None
    while report is None:
        report = followed._stop()
    return report


def refuse(method: str, path: str) -> dict[str, Any]:
    raise ConnectError("10.0.0.1", f"{method} {path}", "connection refused")


def test_a_stop_that_has_to_wait_is_recorded_once(
    job: KubernetesJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = Control()
    waits = []

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        if len(waits) == 3:
            control.stop()
            control.stop()
        return False

    monkeypatch.setattr(control, "wait", wait)
    report = report_after_ctrl_c(job, refuse, control)
    assert "may still be there" in report.problems[0]
    assert job.record.leftovers
    assert len(waits) == 3
    assert journaled(job, events.StopRequested) == [events.StopRequested("Ctrl-C")]


def test_a_deleted_job_that_does_not_go_away(
    job: KubernetesJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that does not answer keeps its pods."""
    monkeypatch.setattr(follow, "GONE_SECONDS", -1000.0)
    control = Control()
    followed = follower(job, lambda method, path: {"metadata": {"name": "c-1"}}, control)
    control.stop("Ctrl-C")
    monkeypatch.setattr(followed, "_attempt_is_read", lambda: control.leave())
    followed._follow()
    assert "c-1 is not gone yet" in notices(job)[-1]


def test_a_container_that_starts_again_alone_ends_the_job(
    job: KubernetesJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the runtimes of Trainer ask. The others would wait for it in vain."""
    control = Control()
    asked: list[str] = []

    def answer(method: str, path: str) -> dict[str, Any]:
        asked.append(f"{method} {path.rpartition('/')[2]}")
        if len(asked) == 1:
            refuse(method, path)
        return {"items": []}

    monkeypatch.setattr(control, "wait", lambda seconds: False)
    followed = follower(job, answer, control)
    monkeypatch.setattr(followed._readers, "read_log", lambda *_: None)
    followed._handle(JobSeen(RUNS))
    followed._handle(PodsListed((replace(pod("a", 1), again=True, state=ShownState.ENDED),)))
    followed._handle(LogEnded("a", whole=True))
    looks = iter([False, False, False, True])

    def over() -> bool:
        if next(looks):
            control.leave()
        return False

    monkeypatch.setattr(followed, "_attempt_is_read", over)
    followed._follow()
    assert asked == ["DELETE c-1", "DELETE c-1"]
    started, failed = notices(job)
    assert started.startswith("node1: Kubernetes has started the failed container again")
    assert failed.endswith("connection refused; trying again")


def test_what_may_be_left_of_a_job_that_could_not_be_created(
    job: KubernetesJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launched, "GONE_SECONDS", -60.0)

    def answer(method: str, path: str) -> dict[str, Any]:
        return (absent if method == "GET" else refuse)(method, path)

    report = follower(job, answer).follow({"ConfigMap": {}, "job": {}})
    assert report.reason.startswith("not created: POST ")
    command = "kubectl delete jobset/c-1 configmap/c-1 --namespace ml --context prod"
    assert f"`{command}` ends it" in report.problems[1]
    assert job.record.leftovers == (("node0", 1), ("node1", 1))


def test_a_full_disk_leaves_the_job(job: KubernetesJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not over: another process may follow it."""

    def full() -> None:
        raise StorageError("no space left on device", hint="free some")

    followed = follower(job, refuse)
    monkeypatch.setattr(followed._readers, "start", lambda: None)
    monkeypatch.setattr(followed, "_follow", full)
    monkeypatch.setattr(job._positions, "save", full)
    report = followed.follow(None)
    assert report.exit_code is ExitCode.NODE_FAILED
    assert notices(job) == ["no space left on device; free some"]
    assert journaled(job, events.Finished) == []


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


def test_a_full_disk_does_not_keep_a_job_from_being_stopped(job: KubernetesJob) -> None:
    control, asked = Control(), []

    def full() -> None:
        raise StorageError("no space left on device", hint="free some")

    def answer(method: str, path: str) -> dict[str, Any]:
        asked.append(f"{method} {path.rpartition('/')[2]}")
        return {"items": []} if path.endswith("/pods") else absent(method, path)

    followed = follower(job, answer, control)
    followed._follow = full  # type: ignore[assignment, method-assign]
    control.stop("Ctrl-C")
    assert followed.follow(None).exit_code is ExitCode.INTERRUPTED
    assert "DELETE c-1" in asked
    assert notices(job) == ["no space left on device", "c-1 is deleted; nothing of it runs"]


def test_a_slow_server_is_waited_for_aloud(
    job: KubernetesJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "SLOW", 0.0)
    waits = "waiting for the API server 10.0.0.1 to answer"

    def answer(method: str, path: str) -> dict[str, Any]:
        until(lambda: waits in notices(job))
        return refuse(method, path)

    assert follower(job, answer).follow({"job": {}}).reason.startswith("not created: ")


def test_a_job_that_a_busy_server_creates_late_is_deleted(job: KubernetesJob) -> None:
    """It may answer the deletion first."""
    control, deleted, created = Control(), threading.Event(), threading.Event()
    there: list[str] = []

    def answer(method: str, path: str) -> dict[str, Any]:
        if method == "POST":
            control.stop("Ctrl-C")
            assert deleted.wait(HANG)
            there.append("c-1")
            created.set()
        elif path.endswith("/pods"):
            return {"items": []}
        elif method == "DELETE" and path.endswith("/jobsets/c-1"):
            if not there:
                deleted.set()
                absent(method, path)
            there.clear()
        elif not there:
            absent(method, path)
        return {"metadata": {"name": "c-1"}}

    assert follower(job, answer, control).follow({"job": {}}).problems
    assert created.wait(HANG)
    assert there == []


def test_a_secret_that_may_be_left_is_named(job: KubernetesJob) -> None:
    """It has no owner until the job is there, so the deletion of the job does not delete it."""
    plan = build(parse(FILE.replace("[x]", "[x], secrets: [TOKEN]"), "c.yaml"))
    client: Any = Server(absent)
    left = launched.LaunchedJob(client, job.record, plan).still_there
    assert " secret/c-1 " in left


@pytest.mark.parametrize("answers", [(), ("GET",)])
def test_what_is_not_created_is_not_deleted(job: KubernetesJob, answers: tuple[str, ...]) -> None:
    """Without a connection, or with objects of the same name that belong to another run."""
    asked = []

    def answer(method: str, path: str) -> dict[str, Any]:
        asked.append(method)
        if not answers:
            refuse(method, path)
        if method in answers:
            absent(method, path)
        raise ConflictError("10.0.0.1", method, "already exists")

    report = follower(job, answer).follow({"ConfigMap": {}, "job": {}})
    assert report.reason.startswith("not created: ")
    assert asked == ["GET", "POST"][: len(answers) + 1]
    assert job.record.leftovers == ()


def test_requests_to_stop_end_the_wait_for_pods(job: KubernetesJob) -> None:
    """A pod on a machine that does not answer stays."""
    deleted = []
    control = Control()
    left = {"metadata": {"name": "c-1-node-0-0", "labels": {INDEX_LABEL: "0"}}}

    def answer(method: str, path: str) -> dict[str, Any]:
        if method == "DELETE":
            deleted.append(path.rpartition("/")[2])
            control.stop("Ctrl-C")
        elif deleted.count("c-1-node-0-0"):
            control.stop("Ctrl-C")
        return {"items": [left]}

    followed = follower(job, answer, control)
    job.job_seen(FAILED, "")
    report = followed._end()
    assert report.exit_code is ExitCode.JOB_FAILED
    assert "pods are still there: c-1-node-0-0" in report.problems[-1]
    assert deleted == ["c-1", "c-1", "c-1-node-0-0"]
    assert job.record.leftovers


def test_a_request_to_stop_during_an_earlier_one_is_not_lost(job: KubernetesJob) -> None:
    control = Control()
    pod = {"metadata": {"name": "c-1-node-0-0", "labels": {INDEX_LABEL: "0"}}}

    def answer(method: str, path: str) -> dict[str, Any]:
        if method == "DELETE" and path.endswith("/c-1-node-0-0"):
            control.stop("Ctrl-C")
        return {"items": [pod]}

    control.kill("Ctrl-C")
    report = follower(job, answer, control)._follow()
    assert report is not None
    assert "may still be there" in report.problems[0]


def test_a_server_that_does_not_answer_does_not_delay_requests_to_stop(job: KubernetesJob) -> None:
    control, over = Control(), threading.Event()
    asked = []

    def answer(method: str, path: str) -> dict[str, Any]:
        asked.append(method)
        control.stop("Ctrl-C")
        assert over.wait(HANG)
        return {"items": []}

    report = report_after_ctrl_c(job, answer, control)
    assert report.exit_code is ExitCode.INTERRUPTED
    assert asked == ["DELETE", "DELETE"]
    over.set()


def test_a_job_is_deleted_once_its_object_is_gone(
    job: KubernetesJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not before: a finalizer may hold it, and its controller may start pods again."""
    monkeypatch.setattr(launched, "GONE_SECONDS", -60.0)
    client: Any = Server(lambda method, path: {"items": [], "metadata": {"name": "c-1"}})
    left = launched.LaunchedJob(client, job.record, job.plan).delete_or_report()
    assert left.startswith("JobSet c-1 is still there\n")


def test_output_is_awaited_for_as_long_as_it_arrives(
    job: KubernetesJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(follow, "time", SimpleNamespace(monotonic=lambda: now[0]))
    followed = follower(job, lambda method, path: {"items": []})
    followed._handle(PodsListed((pod("a"),)))
    followed._handle(JobSeen(FAILED))
    assert not followed._attempt_is_read()
    limit = follow.LOG_SECONDS + job.plan.job.grace
    for _ in range(3):
        now[0] += limit - 1
        followed._handle(PodLines("a", (b"[worker-0] x\n",), 5, 1, 5))
        assert not followed._attempt_is_read()
    now[0] += limit + 1
    assert followed._attempt_is_read()
    assert "could not be read to its end" in notices(job)[-1]


def test_a_job_that_another_process_has_deleted(job: KubernetesJob) -> None:
    followed = follower(job, lambda method, path: {"items": []})
    assert not followed._attempt_is_read()
    followed._handle(JobSeen(None))
    assert followed._attempt_is_read()
