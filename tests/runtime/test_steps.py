"""What a process measures of its steps, as it reaches the launcher."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest

from dtrain.failures.stragglers import Block
from dtrain.messages.decode import ProtocolError
from dtrain.runs.progress import StepReport
from dtrain.runtime import steps as module
from dtrain.runtime.steps import STEPS, StepRecorder
from support.limits import HANG


class Script:
    """A recorder on a clock that only the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.queued = 0.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(module, "seconds_queued", lambda: self.queued)
        self.said: list[dict[str, Any]] = []
        self.recorder = StepRecorder(
            lambda kind, **body: self.said.append({"event": kind, "time": 1.0, **body})
        )

    def step(self, compute: float = 0.0, data: float = 0.0, wait: float = 0.0) -> None:
        def batch() -> Any:
            self.now += data
            yield

        next(self.recorder.data(batch()))
        self.now += compute
        with self.recorder.waiting():
            self.now += wait
        done = self.recorder.end_step()
        self.recorder.add(done, done.whole and done.whole - done.data - done.waited)

    def reports(self) -> list[StepReport]:
        """All reports so far, through the agent and the launcher."""
        self.recorder.write()
        return [StepReport.read("rank-0", body) for body in self.said]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    return Script(monkeypatch)


def test_a_block_has_the_parts_of_its_steps(script: Script) -> None:
    for number in range(1, 2 * STEPS + 1):
        script.queued += 0.002
        # The longest step of a block does not count: it may save a checkpoint.
        script.step(compute=9.0 if number == 15 else 0.5, data=0.25, wait=0.125)
    (report,) = script.reports()
    # The first block lacks a step, since nobody knows when the first step began.
    (block,) = report.blocks
    assert report.done == 2 * STEPS
    assert block == Block(1, 0.875, 0.5, 0.25, pytest.approx(0.002))  # type: ignore[arg-type]


def test_a_script_that_measures_by_itself(script: Script) -> None:
    for number in range(101, 131):
        script.now += 1.0
        script.recorder.report(number, 0.75, 0.125)
    (report,) = script.reports()
    assert report.done == 130
    assert [(one.number, one.compute, one.data) for one in report.blocks] == [
        (11, 0.75, 0.125),
        (12, 0.75, 0.125),
    ]


def test_steps_count_once_if_the_runtime_measures_and_the_script_reports(script: Script) -> None:
    for number in range(500, 505):
        script.step(compute=1.0)
        script.recorder.report(number, None, None)
    (report,) = script.reports()
    assert report.done == 5


def test_a_process_that_stands_says_once_for_what_it_waits(script: Script) -> None:
    script.step(compute=1.0)
    assert [one.waits for one in script.reports()] == [None]
    with script.recorder.waiting():
        script.now += 60.0
        script.reports()
        assert [one.waits for one in script.reports()] == [None, "ranks"]
    script.now += 60.0
    assert [one.waits for one in script.reports()] == [None, "ranks", ""]


def test_unknown_computation_is_null(script: Script) -> None:
    for _ in range(2 * STEPS):
        script.now += 1.0
        script.recorder.add(script.recorder.end_step(), None)
    assert script.reports()[-1].blocks[-1].compute is None


@pytest.mark.parametrize(
    "change",
    [
        {"waits": "for ever"},
        {"waits": []},
        {"done": -1},
        {"done": 1.5},
        {"group": None},
        {"blocks": None},
        {"blocks": [[0, 1.0, 1.0, 1.0, 1.0]] * 65},
        {"blocks": [[0, 1.0, 1.0, 1.0]]},
        {"blocks": [[0, -1.0, 1.0, 0.0, 0.0]]},
        {"blocks": [[0, float("nan"), 1.0, 0.0, 0.0]]},
        {"blocks": [[0, float("inf"), 1.0, 0.0, 0.0]]},
        {"blocks": [[0, 1.0, "1", 0.0, 0.0]]},
        {"blocks": "abcde"},
        {"time": 1e12},
    ],
)
def test_other_reports_are_refused(change: dict[str, Any]) -> None:
    good = {"event": "steps", "time": 1.0, "done": 3, "waits": "", "group": 0, "blocks": []}
    assert StepReport.read("rank-0", good).done == 3
    with pytest.raises(ProtocolError):
        StepReport.read("rank-0", {**good, **change})


def test_a_process_that_is_forked_while_steps_are_written_can_write() -> None:
    writing, done = threading.Event(), threading.Event()

    def tell(kind: str, **body: Any) -> None:
        writing.set()
        done.wait()

    recorder = StepRecorder(tell)
    recorder.end_step()
    thread = threading.Thread(target=recorder.write)
    thread.start()
    assert writing.wait(HANG)
    if (child := os.fork()) == 0:
        signal.alarm(int(HANG))
        recorder.write()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    done.set()
    thread.join()


def test_a_signal_handler_may_save_a_checkpoint_while_an_event_is_written() -> None:
    saved: list[int] = []

    def save(number: int, _frame: object) -> None:
        with recorder.phase("save"):
            saved.append(number)

    def tell(kind: str, **body: Any) -> None:
        if not saved:
            signal.raise_signal(signal.SIGUSR1)

    recorder = StepRecorder(tell)
    recorder.end_step()
    before = signal.signal(signal.SIGUSR1, save)
    try:
        recorder.write()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert saved == [signal.SIGUSR1]


def test_a_step_costs_little() -> None:
    recorder = StepRecorder(lambda kind, **body: None)
    count = 2000
    best = min(timed(recorder, count) for _ in range(5)) / count
    # 0.5 % of a step of 20 ms. It takes about 5 µs.
    assert best < 100e-6


def timed(recorder: StepRecorder, count: int) -> float:
    began = time.thread_time()
    for _ in recorder.data(range(count)):
        with recorder.waiting():
            pass
        done = recorder.end_step()
        recorder.add(done, 0.0)
    return time.thread_time() - began


def test_phases_are_counted_from_the_begin_of_the_process(script: Script) -> None:
    with script.recorder.phase("load"):
        script.now += 3.0
    assert script.said == []  # no step yet: a rank that loads does not stand still
    script.step(data=0.25)
    script.step(data=0.5)
    with script.recorder.phase("save"):
        script.now += 2.0
    with script.recorder.phase("data"):
        script.now += 1.0
    assert [one.phases for one in script.reports()] == [
        {"load": 3.0, "data": 0.75, "save": 2.0},
        {"load": 3.0, "data": 1.75, "save": 2.0},
    ]
    with pytest.raises(ValueError, match="expected one of data, save, load"):
        script.recorder.phase("lunch").__enter__()


def test_the_first_step_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """`dtrain report` counts all phases before this report into the start of the job."""
    monkeypatch.setenv("DTRAIN_RUN_DIR", "/nowhere")
    monkeypatch.setattr(module, "BETWEEN_EVENTS", 10 * HANG)
    reported = threading.Event()
    StepRecorder(lambda kind, **body: reported.set()).end_step()
    assert reported.wait(HANG)


def test_a_script_that_marks_and_reports_its_waits_counts_them_once(script: Script) -> None:
    for step in range(1, 5):
        with script.recorder.phase("data"):
            script.now += 0.25
        script.now += 1.0
        script.recorder.report(step, compute=1.0, data=0.25)
    assert script.reports()[-1].phases == {"data": 1.0}


@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
def test_a_negative_time_says_nothing_and_loses_no_report(script: Script, seconds: float) -> None:
    for step in range(1, STEPS + 2):
        script.now += 1.0
        script.recorder.report(step, compute=seconds, data=seconds)
    assert script.reports()[-1].done == STEPS + 1
    assert script.reports()[-1].phases == {}


@pytest.mark.parametrize("phases", [{"save": -1}, {"data": "1"}, {"load": 1e9}, {"save": None}, 5])
def test_phases_of_a_hostile_worker_are_refused(phases: Any) -> None:
    said = {"event": "steps", "time": 1.0, "done": 1, "waits": None, "group": 0, "blocks": []}
    assert StepReport.read("rank-0", said).phases == {}
    with pytest.raises(ProtocolError):
        StepReport.read("rank-0", {**said, "phases": phases})
