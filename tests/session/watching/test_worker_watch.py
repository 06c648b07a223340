"""The watch over the workers, without hosts."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dtrain.launchplan.plan import Process
from dtrain.messages.agent import Exited, Stack, StacksDone
from dtrain.runs import events
from dtrain.runs.events import StacksReported
from dtrain.runs.log_store import Stream
from dtrain.runs.progress import StepReport
from dtrain.session.watching import stack_requests, whereabouts, worker_watch
from dtrain.session.watching.evidence import HostEvidence
from dtrain.session.watching.steps import StepWatch
from dtrain.session.watching.worker_watch import WorkerWatch


def watching(
    then: str,
    silence: float | None = 0.0,
    recorded: list[events.JournalEvent] | None = None,
    **link: Any,
) -> tuple[WorkerWatch, list[str]]:
    """A watchdog that finds one host too quiet, and its notices."""
    notices: list[str] = []
    recorded = [] if recorded is None else recorded
    watchdog = SimpleNamespace(silence=silence, then=then)
    plan = SimpleNamespace(job=SimpleNamespace(watchdog=watchdog))
    recorder = SimpleNamespace(notice=notices.append, record=recorded.append)
    folder = SimpleNamespace(sizes=lambda plan: {}, path=Path("/none"), name="run-1")
    context: Any = SimpleNamespace(plan=plan, recorder=recorder, steps=StepWatch(1), folder=folder)
    usual = {"reachable": True, "reported_end": False}
    host: Any = SimpleNamespace(
        **usual | link,
        evidence=SimpleNamespace(last_activity=0.0, stacks_complete=False, finished={}),
        request_stacks=lambda abort, ras: None,
    )
    watch = WorkerWatch(context, {"a": host}, longest_pause=1.0)
    watch.start()
    return watch, notices


@pytest.mark.parametrize(("then", "ends"), [("report", False), ("stop", True), ("restart", True)])
def test_a_failure_while_stacks_are_collected(then: str, ends: bool) -> None:
    """It is the cause, unless the job ends because of the hang."""
    recorded: list[events.JournalEvent] = []
    watch, notices = watching(then, recorded=recorded)
    assert not watch.look()
    (notice,) = notices
    assert notice.endswith("; collecting stacks")
    assert bool(watch.why) is ends
    (hang,) = recorded
    assert isinstance(hang, events.HangDetected)
    assert hang.ends is ends


@pytest.mark.parametrize("over", [False, True])
def test_a_host_that_cannot_be_reached_says_nothing_unless_its_part_is_over(over: bool) -> None:
    """A host that was lost after its workers had finished stays unreachable."""
    watch, notices = watching("stop", reachable=False, reported_end=over)
    assert not watch.look()
    assert len(notices) == over


def test_a_launcher_that_stood_still_reads_before_it_judges(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After Ctrl-Z, or on a machine that was suspended, what the workers wrote is not read yet."""
    now = 1000.0
    monkeypatch.setattr(
        worker_watch, "time", SimpleNamespace(monotonic=lambda: now, time=lambda: now)
    )
    watch, notices = watching("stop", silence=60.0)

    def look(after: float) -> int:
        nonlocal now
        now += after
        assert not watch.look()
        return len(notices)

    assert [look(1.0) for _ in range(50)] == [0] * 50
    assert look(3600.0) == 0
    # The silence before it counts, and each look counts for a second at most.
    assert [look(2.0) for _ in range(10)] == [0] * 8 + [1] * 2


def test_a_silent_job_without_a_watchdog_gets_one_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(
        worker_watch, "time", SimpleNamespace(monotonic=lambda: now, time=lambda: now)
    )
    watch, notices = watching("stop", silence=None)
    counts = []
    for _ in range(1300):
        now += 1.0
        assert not watch.look()
        counts.append(len(notices))
    assert counts == [0] * 599 + [1] * 701
    assert "watchdog: {silence: 10m}" in notices[0]
    assert watch.why == ""


def test_a_launcher_that_stood_still_shows_no_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(
        worker_watch, "time", SimpleNamespace(monotonic=lambda: now, time=lambda: now)
    )
    watch, _ = watching("stop", silence=60.0)
    shown: list[object] = []
    watch._job.recorder.record = shown.append  # type: ignore[method-assign]
    watch._job.steps.add("a", StepReport("rank-0", 5, None, 0, (), 0.0), now)
    now += 1.0
    watch.look()
    now += 3600.0
    watch.look()
    assert shown == []
    for _ in range(15):
        now += 1.0
        watch.look()
    assert len(shown) == 1


def test_a_hang_waits_for_the_stacks_of_a_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stacks for the stall would count for the hang, and have no collectives."""
    now = 1000.0
    monkeypatch.setattr(
        worker_watch, "time", SimpleNamespace(monotonic=lambda: now, time=lambda: now)
    )
    watch, notices = watching("stop", silence=20.0)
    job: Any = watch._job
    job.recorder.record = lambda event: None
    host: Any = watch._hosts["a"]
    host.evidence = HostEvidence("a", ())
    asked: list[bool] = []

    def request(abort: bool, ras: bool) -> None:
        host.evidence.expect_stacks()
        asked.append(abort)

    host.request_stacks = request
    job.steps.add("a", StepReport("rank-0", 5, None, 0, (), 0.0), now)

    def look_for(seconds: int) -> list[bool]:
        nonlocal now
        for _ in range(seconds):
            now += 1.0
            assert not watch.look()
        return asked

    assert look_for(30) == [False]
    host.evidence.stacks_complete = True
    assert look_for(2) == [False, True]
    assert notices[-1].endswith("from any worker for 20 s; collecting stacks")
    host.evidence.stacks_complete = True
    assert watch.look()


@pytest.mark.parametrize(
    ("framework", "policy"),
    [("torch", "all_hosts"), ("none", "all_hosts"), ("torch", "first_host")],
)
def test_workers_that_still_run_long_after_the_others_are_named(
    monkeypatch: pytest.MonkeyPatch, framework: str, policy: str
) -> None:
    """With their stacks. Programs without a framework may not wait for each other, nor a driver for
    servers."""
    now = 1000.0
    monkeypatch.setattr(
        worker_watch, "time", SimpleNamespace(monotonic=lambda: now, time=lambda: now)
    )
    watch, notices = watching("stop", silence=math.inf)
    job: Any = watch._job
    job.plan.job.framework, job.plan.job.success_policy = framework, policy
    waits = (framework, policy) == ("torch", "all_hosts")
    watch._hosts["a"].evidence = HostEvidence("a", ())
    ranks = [Process("worker", rank, (), {}, rank=rank) for rank in range(4)]
    evaluator = Process("evaluator", 0, (), {})
    job.plan.hosts = [SimpleNamespace(host=watch._hosts["a"], processes=[*ranks, evaluator])]
    watch._hosts["a"].name = "a"  # type: ignore[attr-defined]
    asked: list[bool] = []
    watch._hosts["a"].request_stacks = lambda abort, ras: asked.append(abort)  # type: ignore[method-assign]
    finished = watch._hosts["a"].evidence.finished

    def look_for(seconds: int) -> list[str]:
        nonlocal now
        notices.clear()
        for _ in range(seconds):
            now += 1.0
            assert not watch.look()
        return [*notices]

    assert look_for(100) == []
    finished |= {"0": 1.0, "2": 2.0}
    assert look_for(50) == []
    finished["3"] = 3.0
    assert look_for(50) == []
    named = "rank 1 on a still runs, 60 s after 3 others have finished; collecting stacks"
    assert look_for(20) == ([named] if waits else [])
    assert asked == ([False] if waits else [])
    assert watch.finished() == [("0", "a", 1.0), ("2", "a", 2.0), ("3", "a", 3.0)]


class Silent:
    """A job on one host that writes nothing more, with the stderr of each of its workers."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, stderr: Sequence[str]
    ) -> None:
        self.now = 1000.0
        clock = SimpleNamespace(monotonic=lambda: self.now, time=lambda: self.now)
        monkeypatch.setattr(worker_watch, "time", clock)
        self.watch, self.notices = watching("stop", silence=None)
        job: Any = self.watch._job
        job.plan.job.framework = "none"
        self.evidence = self.watch._hosts["a"].evidence = HostEvidence("a", ())
        self.files = [folder / f"worker-{rank}.err" for rank in range(len(stderr))]
        streams = [
            Stream("a", "worker", rank, rank, "stderr", file)
            for rank, file in enumerate(self.files)
        ]
        job.folder.sizes = lambda plan: dict.fromkeys(streams, 1)
        for rank, text in enumerate(stderr):
            self.write(rank, text)

    def write(self, rank: int, text: str) -> None:
        self.files[rank].write_text(text)
        os.utime(self.files[rank], (self.now, self.now))
        self.evidence.last_activity = self.now

    def look_for(self, seconds: int) -> list[str]:
        self.notices.clear()
        for _ in range(seconds):
            self.now += 1.0
            assert not self.watch.look()
        return [*self.notices]


RAISED = 'Traceback (most recent call last):\n  File "t.py", line 4, in <module>\nValueError: bad\n'


def test_a_worker_that_does_not_end_after_an_exception_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JAX 0.10.2: a process that fails waits 300 s for the others before it exits."""
    went_on = f"{RAISED}step 4\n" + "step\n" * 5
    job = Silent(tmp_path, monkeypatch, ["loading\n", RAISED, went_on, RAISED])
    job.evidence.finished["3"] = 990.0
    named = (
        "rank 1 on a raised an exception and has not ended: ValueError: bad; it may wait for the"
        " others"
    )
    assert job.look_for(15) == []
    assert job.look_for(15) == [named]
    job.evidence.last_activity = job.now
    assert job.look_for(30) == []
    job.write(0, f"[rank0]: {RAISED}".replace("\n", "\n[rank0]: ").removesuffix("[rank0]: "))
    assert job.look_for(30) == [named.replace("1", "0")]


@pytest.mark.parametrize(("seconds", "is_named"), [(30, True), (90, False)])
def test_a_job_that_goes_on_after_an_exception_has_caught_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: int, *, is_named: bool
) -> None:
    """Such as that of a bad record, which the script logs: its ranks may print nothing else."""
    job = Silent(tmp_path, monkeypatch, [RAISED])
    for _ in range(seconds // 10):
        assert job.look_for(10) == []
        job.evidence.last_activity = job.now
    assert len(job.look_for(30)) == is_named


def test_an_exception_that_python_ignores_is_not_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignored = f"Exception ignored in: <function Loader.__del__ at 0x7f>\n{RAISED}"
    assert Silent(tmp_path, monkeypatch, [ignored]).look_for(30) == []


def test_many_workers_with_exceptions_of_their_own_take_few_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [RAISED.replace("bad", f"record {rank // 2}") for rank in range(1000)]
    found = Silent(tmp_path, monkeypatch, texts).look_for(30)
    assert len(found) == 4
    assert found[-1] == "ranks 6-999 on a raised other exceptions and have not ended"


def stuck(streams: list[Stream], **hosts: HostEvidence) -> list[str]:
    folder = SimpleNamespace(sizes=lambda plan: dict.fromkeys(streams, 1))
    context: Any = SimpleNamespace(
        plan=SimpleNamespace(job=SimpleNamespace(watchdog=None)), folder=folder
    )
    watched: Any = {name: SimpleNamespace(evidence=evidence) for name, evidence in hosts.items()}
    return WorkerWatch(context, watched, longest_pause=1.0).where.describe()


def test_only_workers_that_still_run_hang_somewhere() -> None:
    streams = [Stream("a", "worker", rank, rank, "stderr", Path("/none")) for rank in (0, 1)]
    # A copy of the host's folder, which a user has made during the run.
    streams.append(Stream("a.bak", "worker", 0, 0, "stderr", Path("/none")))
    evidence = HostEvidence("a", ())
    evidence.add(Exited(1.0, "worker", 0, 0, 7, 0, None, stopping=False))
    evidence.add(Stack(1.0, "worker", 1, 1, "    load (/home/ml/train.py:4)"))
    assert stuck(streams, a=evidence) == ["rank 1 on a: in load (/home/ml/train.py:4)"]


def test_a_hint_about_ranks_that_wait_in_different_places() -> None:
    def found(role: str, *lines: int) -> list[str]:
        evidence = HostEvidence("a", ())
        streams = []
        for index, line in enumerate(lines):
            rank = index if role == "worker" else None
            streams.append(Stream("a", role, index, rank, "stderr", Path("/none")))
            text = f"    step (/home/ml/train.py:{line})"
            evidence.add(Stack(1.0, role, index, rank, text))
        return stuck(streams, a=evidence)

    apart = found("worker", 4, 4, 9)
    assert len(apart) == 3
    assert apart[-1] == whereabouts.APART
    assert len(found("worker", 4, 4, 4)) == 1
    # The servers of parameters always wait in another place than the workers.
    assert len(found("ps", 4, 9)) == 2


def test_the_ranks_of_a_torchrun_that_has_finished_hang_nowhere() -> None:
    hosts = {name: HostEvidence(name, ()) for name in ("a", "b")}
    streams = []
    for rank, name in enumerate(hosts):
        streams.append(Stream(name, "torchrun", rank, None, "stderr", Path("/none")))
        streams.append(Stream(name, "worker", rank, rank, "stderr", Path("/none")))
    hosts["a"].add(Exited(1.0, "torchrun", 0, None, 7, 0, None, stopping=False))
    hosts["b"].add(Stack(1.0, "worker", 1, 1, "    load (/home/ml/train.py:4)"))
    assert stuck(streams, **hosts) == ["rank 1 on b: in load (/home/ml/train.py:4)"]


def test_ranks_may_share_the_streams_of_their_torchrun() -> None:
    evidence = HostEvidence("a", ())
    evidence.add(Stack(1.0, "worker", 0, 0, "    step (/home/ml/train.py:9)"))
    evidence.add(Stack(1.0, "worker", 1, 1, "    load (/home/ml/train.py:4)"))
    streams = [Stream("a", "torchrun", 0, None, "stderr", Path("/none"))]
    assert stuck(streams, a=evidence)[:2] == [
        "rank 0 on a: in step (/home/ml/train.py:9)",
        "rank 1 on a: in load (/home/ml/train.py:4)",
    ]


def test_all_ranks_are_compared_once_a_second_however_often_the_launcher_looks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 10.0
    monkeypatch.setattr(
        worker_watch, "time", SimpleNamespace(monotonic=lambda: now, time=lambda: now)
    )
    watch, _ = watching("stop", silence=60.0)
    compared: list[float] = []
    monkeypatch.setattr(StepWatch, "stragglers", lambda self, then: compared.append(then))
    for tenth in range(100, 125):
        now = tenth / 10
        watch.look()
    assert compared == [10.0, 11.0, 12.0]


def test_a_request_is_answered_without_the_hosts_that_cannot_be_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(
        worker_watch, "time", SimpleNamespace(monotonic=lambda: now, time=lambda: now)
    )
    watch, notices = watching("stop", silence=None)
    job: Any = watch._job
    answers: list[StacksReported] = []
    job.recorder.record = answers.append
    job.folder.path = tmp_path
    hosts: Any = {
        name: SimpleNamespace(
            reachable=name != "c",
            reported_end=False,
            evidence=HostEvidence(name, ()),
            request_stacks=lambda abort, ras: asked.append(abort),
        )
        for name in ("a", "b", "c")
    }
    asked: list[bool] = []
    watch = WorkerWatch(job, hosts, longest_pause=1.0)
    watch.start()
    stack_requests.place(job.folder)
    assert not watch.look()
    assert asked == []  # a process that took charge just now may still connect
    now += worker_watch.CONNECT_SECONDS
    assert not watch.look()
    assert asked == [False] * 3
    hosts["a"].evidence.add(Stack(1.0, "worker", 0, 0, "    step (/home/ml/train.py:9)"))
    for rank, name in enumerate("ab", 1):
        hosts[name].evidence.add(Stack(1.0, "worker", rank, rank, "", "no py-spy"))
        assert not watch.look()
        assert answers == []
        hosts[name].evidence.add(StacksDone(1.0))
    stack_requests.place(job.folder)  # another one, which the answer to the first is too old for
    assert not watch.look()
    (answer,) = answers
    assert [(group.workers, group.frames) for group in answer.groups] == [
        ((("0", "a"),), ("step (/home/ml/train.py:9)",))
    ]
    assert answer.notes == ("no stack of ranks 1-2 on a,b: no py-spy", "no answer from c")
    assert not watch.look()
    assert len(asked) == 6
    assert notices == []
