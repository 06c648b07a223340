"""Runs of two layouts teach the planner the speed of a machine that it does not know."""

from __future__ import annotations

import time
from dataclasses import asdict, replace

import pytest

from dtrain import PlanRequest
from dtrain.diagnostics import UsageError
from dtrain.parallelism.calibrated import MeasuredRun, calibrated
from dtrain.parallelism.cost.speed import flop_per_token
from dtrain.parallelism.question import Question
from dtrain.planning.question import pose
from dtrain.runs import events, journal
from dtrain.runs.calibration import learned
from dtrain.runs.folder import RunFolder
from dtrain.runs.progress import Progress
from dtrain.runs.record import Record
from dtrain.runs.request import Request
from dtrain.runtime.layout import Layout
from dtrain_cli.views.question import described
from support.json_page import undocumented

FILE = """
cluster: {hosts: [a, b], gpus: 4}
job:
  framework: torch
  script: train.py
  training: {global_batch: 32, seq_len: 2048, precision: bf16}
  layout: {tensor: 4, data: 2, sharding: optimizer, micro_batch: 2, grad_accumulation: 8}
  expected: {step_time: 2.0}
"""


@pytest.fixture(scope="module")
def question() -> Question:
    request = PlanRequest(
        model_size="1B", gpus=8, gpu="a100-80gb", gpus_per_host=4, seq_len=2048, global_batch=32
    )
    return pose(request)


def run(question: Question, layout: Layout) -> MeasuredRun:
    """A run on a machine that computes at a seventh and communicates at a third of the speed."""
    usual = question.efficiency
    slow = replace(
        usual,
        gemm=usual.gemm / 7, attention=usual.attention / 7, stream=usual.stream / 7,
        launch=usual.launch * 7, gap=usual.gap * 7, fixed=usual.fixed * 7,
        link=usual.link / 3, network=usual.network / 3,
        latency=usual.latency * 3,
        link_step=usual.link_step * 3, network_step=usual.network_step * 3,
    )  # fmt: skip
    step = replace(question, efficiency=slow).candidate(layout).time.total
    return MeasuredRun("run", layout, 2048, "bf16", 2, step, flop_per_token(question.shape))


TENSOR = Layout(tensor=4, data=2, sharding="optimizer", micro_batch=2, grad_accumulation=8)
DATA = Layout(data=8, sharding="full", micro_batch=1, grad_accumulation=4)
BOTH = Layout(tensor=2, data=4, sharding="optimizer", micro_batch=1, grad_accumulation=8)


def test_two_runs_predict_a_third_layout(question: Question) -> None:
    found = calibrated(question, [run(question, TENSOR), run(question, DATA)])
    for error in found.calibration:
        assert undocumented(asdict(error)) == set()
        assert error.before_s < 0.3 * error.measured_s
        assert error.after_s == pytest.approx(error.measured_s, rel=0.2)
    truth = run(question, BOTH).step_time
    assert question.candidate(BOTH).time.total < 0.3 * truth
    assert found.candidate(BOTH).time.total == pytest.approx(truth, rel=0.25)


def test_each_run_is_also_predicted_from_the_others(question: Question) -> None:
    runs = [run(question, layout) for layout in (TENSOR, DATA, BOTH)]
    found = calibrated(question, runs)
    for error, one in zip(found.calibration, runs, strict=True):
        others = calibrated(question, [other for other in runs if other is not one])
        assert error.unseen_s == others.candidate(one.layout).time.total
        assert error.unseen_s == pytest.approx(error.measured_s, rel=0.25)
    text = dict(described(found, ()))["Learned"]
    assert " before (" in text and " after (" in text and " from the other runs alone (" in text


def test_one_run_predicts_itself(question: Question) -> None:
    found = calibrated(question, [run(question, DATA)])
    (error,) = found.calibration
    assert error.before_s < 0.3 * error.measured_s
    assert error.after_s == pytest.approx(error.measured_s, rel=0.1)
    assert error.unseen_s is None
    assert "from the other runs" not in dict(described(found, ()))["Learned"]


def test_runs_that_are_as_expected_change_nothing(question: Question) -> None:
    runs = [
        replace(run(question, layout), step_time=question.candidate(layout).time.total)
        for layout in (TENSOR, DATA)
    ]
    assert calibrated(question, runs).efficiency == question.efficiency


def test_runs_that_contradict_each_other_stay_between_them(question: Question) -> None:
    """A run of one layout was disturbed: neither factor becomes absurd."""
    usual = question.candidate(TENSOR).time.total
    runs = [replace(run(question, TENSOR), step_time=usual * factor) for factor in (0.5, 8.0)]
    found = calibrated(question, runs)
    for layout in (TENSOR, DATA, BOTH):
        ratio = found.candidate(layout).time.total / question.candidate(layout).time.total
        assert 0.5 < ratio < 8


def test_a_run_of_another_model_is_refused(question: Question) -> None:
    other = replace(run(question, DATA), flop_per_token=1e9)
    with pytest.raises(UsageError, match="run run trained another model: 1 GFLOP"):
        calibrated(question, [other])


def test_a_run_is_read_from_its_folder(
    question: Question, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path_factory.mktemp("home")))
    folder = RunFolder.create("run-1")
    Record("run-1", Request("c.yaml", "/", FILE), 29500, "python3", time.time()).save(folder.path)
    folder.journal.touch(mode=0o600)
    with pytest.raises(UsageError, match="run-1 reports no time"):
        learned(question, ["run"])
    steps = [(1, 0.0), (2, 30.0), (3, 32.0), (4, 34.0)]
    written = [
        events.Progressed(Progress("rank-0", at, step, 4, 1.0, None, {})) for step, at in steps
    ]
    folder.journal.write_bytes(b"".join(journal.encode(1e9, event) for event in written))
    (error,) = learned(question, ["run"]).calibration
    assert (error.run, error.measured_s) == ("run-1", 2.0)
    fewer = replace(Record.load(folder.path), dropped={"b": 1})
    fewer.save(folder.path)
    with pytest.raises(UsageError, match="run-1 continued without some of its hosts"):
        learned(question, ["run"])
    for key in ("layout", "training"):
        plain = FILE.replace(f"  {key}:", f"  # {key}:")
        Record("run-1", Request("c.yaml", "/", plain), 29500, "python3", 1.0).save(folder.path)
        with pytest.raises(UsageError, match=r"no job\.layout"):
            learned(question, ["run-1"])
