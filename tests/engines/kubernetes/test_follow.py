"""What follows a job does what the server says and the user asks, until its report."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dtrain.diagnostics import ConnectError, ExitCode
from dtrain.engines.kubernetes import follow, launched, reading
from dtrain.engines.kubernetes.client import AbsentError, ConflictError, ForbiddenError
from dtrain.engines.kubernetes.follow import KubernetesFollower
from dtrain.engines.kubernetes.job import KubernetesJob
from dtrain.engines.kubernetes.objects import INDEX_LABEL
from dtrain.failures.cause import LEFT, Report
from dtrain.launchplan.build import build
from dtrain.runs import events
from dtrain.runs.events import RunEvent
from dtrain.runs.folder import RunFolder
from dtrain.runs.journal import JournalReader
from dtrain.runs.record import Record
from dtrain.runs.request import Request
from dtrain.session.caller import Caller
from dtrain.session.reporting import recorder
from dtrain.session.reporting.observer import Observer
from dtrain.session.stopping.control import Control
from dtrain.session.watching import worker_watch
from dtrain.spec.load import parse
from support.disks import disk, fill
from support.kubernetes.stub_stream import StubStream
from support.limits import HANG, until

FILE = """
cluster: {kubernetes: {image: i, queue: gpu}, nodes: 2, slots: 1}
job: {framework: none, command: [x]}
"""
RUNS = {"metadata": {"name": "c-1", "uid": "u"}}
FAILED = {
    **RUNS,
    "status": {
        "conditions": [{"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}]
    },
}
BEGINS = b"2026-11-22T10:00:00.1Z [dtrain] begins\n"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a disk needs root")

Answer = Callable[[str, str], dict[str, Any]]
Log = Callable[[], Generator[list[bytes]]]


def pod(uid: str, index: int = 0, **container: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": f"pod-{uid}", "uid": uid, "labels": {INDEX_LABEL: str(index)}},
        "spec": {"nodeName": "m"},
        "status": {
            "phase": "Running",
            "containerStatuses": [{"name": "node", "state": {"running": {}}, **container}],
        },
    }


def ended(code: int) -> dict[str, Any]:
    return {"state": {"terminated": {"exitCode": code}}}


class Server:
    """Answers requests with a function, and has the logs of pods. Its watches are quiet."""

    namespace, host, context = "ml", "10.0.0.1", "prod"

    def __init__(self, answer: Answer, logs: Mapping[str, Log]) -> None:
        self._answer, self._logs = answer, logs
        self.closed = threading.Event()

    def request(self, method: str, path: str, body: Any = None, **_: Any) -> dict[str, Any]:
        return self._answer(method, path)

    def stream(self, path: str, **_: Any) -> StubStream:
        if path.endswith("/log"):
            return StubStream(self._logs[path.split("/")[-2]]())
        self.closed.wait()
        return StubStream(lines for lines in ())


class Shown(Observer):
    """Keeps what the user sees, and calls ``react`` with each notice."""

    def __init__(self) -> None:
        self.events: list[RunEvent] = []
        self.react: Callable[[str], None] = lambda text: None

    def on_event(self, event: RunEvent) -> None:
        self.events.append(event)
        if isinstance(event, events.NoticeShown):
            self.react(event.text)

    @property
    def notices(self) -> list[str]:
        return [event.text for event in self.events if isinstance(event, events.NoticeShown)]


@pytest.fixture
def shown() -> Shown:
    return Shown()


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown: Shown) -> KubernetesJob:
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    return new_job(shown)


def new_job(shown: Shown) -> KubernetesJob:
    record = Record("run-1", Request("c.yaml", "/", FILE), 29500, "python3", 1e9)
    return KubernetesJob(record, RunFolder.create("run-1"), Caller(shown), {})


def followed(
    job: KubernetesJob,
    answer: Answer,
    control: Control | None = None,
    submit: dict[str, Any] | None = None,
    **logs: Log,
) -> Report:
    """``logs``: by the uid of the pod."""
    server = Server(answer, {f"pod-{uid}": log for uid, log in logs.items()})
    client: Any = server
    try:
        return KubernetesFollower(job, client, control or Control()).follow(submit)
    finally:
        server.closed.set()


def stopped(job: KubernetesJob, answer: Answer, control: Control, **logs: Log) -> Report:
    """After Ctrl-C."""
    control.stop("Ctrl-C")
    return followed(job, answer, control, **logs)


def absent(method: str, path: str) -> dict[str, Any]:
    raise AbsentError("10.0.0.1", f"{method} {path}", "not found")


def refuse(method: str, path: str) -> dict[str, Any]:
    raise ConnectError("10.0.0.1", f"{method} {path}", "connection refused")


def one_line() -> Generator[list[bytes]]:
    yield [BEGINS]


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
    report = stopped(job, refuse, control)
    assert "may still be there" in report.problems[0]
    assert job.record.leftovers
    assert len(waits) == 3
    journaled = [event for _, event in JournalReader(job.folder.journal).read()]
    assert journaled.count(events.StopRequested("Ctrl-C")) == 1


def test_a_deleted_job_that_does_not_go_away(
    job: KubernetesJob, shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that does not answer keeps its pods."""
    monkeypatch.setattr(follow, "GONE_SECONDS", -1000.0)
    control = Control()

    def leave(text: str) -> None:
        if "c-1 is not gone yet" in text:
            control.leave()

    shown.react = leave
    report = stopped(job, lambda method, path: {**RUNS, "items": [pod("a")]}, control)
    assert report.reason == LEFT.reason


def test_a_container_that_starts_again_alone_ends_the_job(
    job: KubernetesJob, shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the runtimes of Trainer ask. The others would wait for it in vain."""
    monkeypatch.setattr(reading, "JOB_SECONDS", 0.01)
    control = Control()
    monkeypatch.setattr(control, "wait", lambda seconds: False)
    again = pod("a", 1, restartCount=1, lastState=ended(1)["state"])
    deletions = 0
    looks = iter(range(20))

    def answer(method: str, path: str) -> dict[str, Any]:
        nonlocal deletions
        # Its pods take a moment to end.
        gone = deletions >= 2 and next(looks, None) is None
        if path.endswith("/pods"):
            return {"items": [] if gone else [again]}
        if gone:
            absent(method, path)
        if method == "DELETE":
            deletions += 1
            if deletions == 1:
                refuse(method, path)
        return RUNS

    report = followed(job, answer, control, a=one_line)
    assert deletions == 2
    started, refused = shown.notices
    assert started.startswith("node1: Kubernetes has started the failed container again")
    assert refused.endswith("connection refused; trying again")
    assert report.exit_code is ExitCode.JOB_FAILED


def test_a_job_that_hangs_is_deleted_although_the_server_was_down(
    job: KubernetesJob, shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = Control()
    monkeypatch.setattr(control, "wait", lambda seconds: False)
    monkeypatch.setattr(worker_watch.WorkerWatch, "why", "no output")
    job.watch.hung = True
    deletions = 0

    def answer(method: str, path: str) -> dict[str, Any]:
        nonlocal deletions
        if path.endswith("/pods"):
            return {"items": []}
        if deletions >= 2:
            absent(method, path)
        if method == "DELETE":
            deletions += 1
            if deletions == 1:
                refuse(method, path)
        return RUNS

    report = followed(job, answer, control)
    assert deletions == 2
    assert report.reason == "no output"


def test_what_may_be_left_of_a_job_that_could_not_be_created(
    job: KubernetesJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launched, "GONE_SECONDS", -60.0)

    def answer(method: str, path: str) -> dict[str, Any]:
        return (absent if method == "GET" else refuse)(method, path)

    report = followed(job, answer, submit={"ConfigMap": {}, "job": {}})
    assert report.reason.startswith("not created: POST ")
    command = "kubectl delete jobset/c-1 configmap/c-1 --namespace ml --context prod"
    assert f"`{command}` ends it" in report.problems[1]
    assert job.record.leftovers == (("node0", 1), ("node1", 1))


@needs_root
def test_a_full_disk_leaves_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown: Shown
) -> None:
    """It is not over: another process may follow it."""
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path / "home"))
    asked = []

    def answer(method: str, path: str) -> dict[str, Any]:
        asked.append(method)
        return {"items": [pod("a")]} if path.endswith("/pods") else RUNS

    with disk(tmp_path / "home", "1m"):
        job = new_job(shown)
        fill(tmp_path / "home")
        report = followed(job, answer, a=one_line)
    assert report.exit_code is ExitCode.NODE_FAILED
    assert "No space left on device; free some space on this machine" in shown.notices[-1]
    assert shown.events[-1] == events.RunLeft("run-1", still_running=True)
    assert {*asked} == {"GET"}


@needs_root
def test_a_full_disk_does_not_keep_a_job_from_being_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown: Shown
) -> None:
    """Nor does it hide the report."""
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path / "home"))
    deleted = []

    def answer(method: str, path: str) -> dict[str, Any]:
        if path.endswith("/pods"):
            return {"items": [] if deleted else [pod("a")]}
        if method == "DELETE":
            deleted.append(path.rpartition("/")[2])
        return absent(method, path) if deleted else RUNS

    with disk(tmp_path / "home", "1m"):
        job = new_job(shown)
        fill(tmp_path / "home")
        report = stopped(job, answer, Control(), a=one_line)
    assert report.exit_code is ExitCode.INTERRUPTED
    assert "c-1" in deleted
    assert any("No space left on device" in text for text in shown.notices)
    assert shown.notices[-1] == "c-1 is deleted; nothing of it runs"
    assert shown.events[-1] == events.Finished(report)


def test_a_slow_server_is_waited_for_aloud(
    job: KubernetesJob, shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "SLOW", 0.0)
    waits = "waiting for the API server 10.0.0.1 to answer"

    def answer(method: str, path: str) -> dict[str, Any]:
        until(lambda: waits in shown.notices)
        return refuse(method, path)

    assert followed(job, answer, submit={"job": {}}).reason.startswith("not created: ")


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
        return RUNS

    assert followed(job, answer, control, submit={"job": {}}).problems
    assert created.wait(HANG)
    assert there == []


def test_a_secret_that_may_be_left_is_named(job: KubernetesJob) -> None:
    """It has no owner until the job is there, so the deletion of the job does not delete it."""
    spec = parse(FILE.replace("[x]", "[x], secrets: [TOKEN]"), "c.yaml")
    plan = build(spec, run=job.record.run)
    client: Any = Server(absent, {})
    left = launched.LaunchedJob(client, plan).still_there
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

    report = followed(job, answer, submit={"ConfigMap": {}, "job": {}})
    assert report.reason.startswith("not created: ")
    assert asked == ["GET", "POST"][: len(answers) + 1]
    assert job.record.leftovers == ()


def test_requests_to_stop_end_the_wait_for_pods(job: KubernetesJob) -> None:
    """A pod on a machine that does not answer stays."""
    deleted: list[str] = []
    control = Control()
    left = {"metadata": {"name": "c-1-node-0-0", "labels": {INDEX_LABEL: "0"}}}

    def answer(method: str, path: str) -> dict[str, Any]:
        if method == "DELETE":
            deleted.append(path.rpartition("/")[2])
            control.stop("Ctrl-C")
        elif deleted.count("c-1-node-0-0"):
            control.stop("Ctrl-C")
        return {"items": [left]} if path.endswith("/pods") else FAILED

    report = followed(job, answer, control)
    assert report.exit_code is ExitCode.JOB_FAILED
    assert "pods are still there: c-1-node-0-0" in report.problems[-1]
    assert deleted == ["c-1", "c-1", "c-1-node-0-0"]
    assert job.record.leftovers


def test_a_request_to_stop_during_an_earlier_one_is_not_lost(job: KubernetesJob) -> None:
    control = Control()
    left = {"metadata": {"name": "c-1-node-0-0", "labels": {INDEX_LABEL: "0"}}}

    def answer(method: str, path: str) -> dict[str, Any]:
        if method == "DELETE" and path.endswith("/c-1-node-0-0"):
            control.stop("Ctrl-C")
        return {"items": [left]} if path.endswith("/pods") else RUNS

    control.kill("Ctrl-C")
    assert "may still be there" in followed(job, answer, control).problems[0]


def test_a_user_who_may_not_list_pods_waits_for_the_job_alone(
    job: KubernetesJob, shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its object goes after its pods."""
    monkeypatch.setattr(reading, "JOB_SECONDS", 0.01)
    looks = iter(range(2))
    deleted = []

    def answer(method: str, path: str) -> dict[str, Any]:
        if path.endswith("/pods"):
            raise ForbiddenError("10.0.0.1", f"{method} {path}", "cannot list pods")
        if method == "DELETE":
            deleted.append(path)
        elif deleted and next(looks, None) is None:
            absent(method, path)
        return RUNS

    report = stopped(job, answer, Control())
    assert (report.exit_code, report.problems) == (ExitCode.INTERRUPTED, ())
    assert next(looks, None) is None
    assert shown.notices[-1] == "c-1 is deleted; nothing of it runs"


def test_a_server_that_does_not_answer_does_not_delay_requests_to_stop(job: KubernetesJob) -> None:
    control, over = Control(), threading.Event()
    asked = []

    def answer(method: str, path: str) -> dict[str, Any]:
        if method == "DELETE":
            asked.append(path.rpartition("/")[2])
            control.stop("Ctrl-C")
            assert over.wait(HANG)
        return {"items": []}

    report = stopped(job, answer, control)
    assert report.exit_code is ExitCode.INTERRUPTED
    assert asked == ["c-1", "c-1"]
    over.set()


def test_a_job_is_deleted_once_its_object_is_gone(
    job: KubernetesJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not before: a finalizer may hold it, and its controller may start pods again."""
    monkeypatch.setattr(launched, "GONE_SECONDS", -60.0)
    client: Any = Server(lambda method, path: {"items": [], **RUNS}, {})
    left = launched.LaunchedJob(client, job.plan).delete_or_report()
    assert left.startswith("JobSet c-1 is still there\n")


def test_output_is_awaited_for_as_long_as_it_arrives(
    job: KubernetesJob, shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, looks = [0.0], threading.Semaphore(0)
    limit = follow.LOG_SECONDS + job.plan.job.grace

    def monotonic() -> float:
        looks.release()
        return now[0]

    def looks_again() -> None:
        while looks.acquire(blocking=False):
            pass
        # It looks up to three times between two events.
        for _ in range(6):
            assert looks.acquire(timeout=HANG)

    def passes(seconds: float) -> None:
        """Time, once the follower has stored the line."""
        looks_again()
        now[0] += seconds
        looks_again()

    def log() -> Generator[list[bytes]]:
        for second in range(2, 5):
            yield [BEGINS.replace(b".1Z [dtrain] begins", b".%dZ [worker-0] x" % second)]
            passes(limit - 1)
        now[0] += 2
        over.wait(HANG)

    monkeypatch.setattr(follow, "TICK", 0.01)
    monkeypatch.setattr(follow, "time", SimpleNamespace(monotonic=monotonic))
    over, deleted = threading.Event(), []

    def answer(method: str, path: str) -> dict[str, Any]:
        if method == "DELETE":
            deleted.append(path)
        if path.endswith("/pods"):
            return {"items": [] if deleted else [pod("a", **ended(1))]}
        return absent(method, path) if deleted else FAILED

    followed(job, answer, a=log)
    over.set()
    assert (job.folder.logs / "node0" / "worker-0.out").read_text() == "x\n" * 3
    assert "could not be read to its end" in shown.notices[-1]


def test_a_pod_that_the_watch_has_not_shown_is_read(job: KubernetesJob) -> None:
    """It started and failed between two answers."""
    deleted: list[str] = []

    def answer(method: str, path: str) -> dict[str, Any]:
        if method == "DELETE":
            deleted.append(path)
        if path.endswith("/pods"):
            watches = threading.current_thread().name == "dtrain-blocking"
            return {"items": [] if watches or deleted else [pod("a", **ended(1))]}
        return absent(method, path) if deleted else FAILED

    def log() -> Generator[list[bytes]]:
        yield [BEGINS, BEGINS.replace(b"[dtrain] begins", b"[worker-0] x")]

    followed(job, answer, a=log)
    assert (job.folder.logs / "node0" / "worker-0.out").read_text() == "x\n"


def test_a_job_that_another_process_has_deleted(job: KubernetesJob, shown: Shown) -> None:
    refusals = iter([refuse])

    def answer(method: str, path: str) -> dict[str, Any]:
        if path.endswith("/pods"):
            return {"items": []}
        return next(refusals, absent)(method, path)

    assert followed(job, answer).reason == "c-1 was deleted outside dtrain"
    assert shown.notices[0].endswith("connection refused; the job goes on, trying again")
