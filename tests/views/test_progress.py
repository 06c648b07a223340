"""The line of progress in each output format."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dtrain.diagnostics import ExitCode
from dtrain.failures.cause import Report
from dtrain.launchplan.build import build
from dtrain.runs import events
from dtrain.runs.progress import Progress
from dtrain.spec.load import parse
from dtrain.spec.model import Expected
from dtrain_cli.views import Filters, make_view, names
from dtrain_cli.views.progress import ProgressLine
from support.limits import HANG
from support.runs import Capture, plan

DONE = Report(ExitCode.OK, "all 4 workers finished", seconds=41, logs="/runs/demo-1")


def report(step, time, process="rank-0", loss=2.0, total=100, tokens=None, **metrics):
    return Progress(process, time, step, total, loss, tokens, metrics)


def text(*reports):
    follower = ProgressLine()
    for one in reports:
        follower.add(one)
    return follower.text


def test_the_line():
    assert text() == ""
    assert text(report(1, 0.0, loss=None, total=None)) == "step 1"
    assert text(report(1, 0.0), report(11, 2.0, tokens=None, lr=1e-4)) == (
        "step 11 of 100 · loss 2 · lr 0.0001 · 5.0 steps/s · 17 s left"
    )
    slow = report(1000, 0.0, tokens=0, total=9000), report(1001, 8.0, tokens=4_000_000, total=9000)
    assert text(*slow) == (
        "step 1,001 of 9,000 · loss 2 · 8.0 s/step · 500k tokens/s · 17 h 46 min left"
    )
    assert text(report(1, 0.0, loss=float("nan"))) == "step 1 of 100 · loss nan"


def test_the_readme_shows_the_line():
    readme = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
    (sample,) = (line for line in readme.splitlines() if line.startswith("dtrain: step"))
    reports = [
        report(72, 0.0, total=240, tokens=0),
        report(142, 10.0, total=240, loss=2.4051, tokens=286_000),
    ]
    assert sample == f"dtrain: {text(*reports)}"


def test_a_narrow_screen_keeps_the_time_left():
    line = ProgressLine()
    line.add(report(1, 0.0, tokens=0, lr=1e-4))
    line.add(report(11, 2.0, tokens=9000, lr=1e-4))
    assert line.fitted(100) == line.text
    assert line.fitted(60) == "step 11 of 100 · loss 2 · 5.0 steps/s · 17 s left"
    assert line.fitted(30) == "step 11 of 100 · 17 s left"
    assert line.fitted(3) == "step 11 of 100"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(59.9, "59 s"), (3599, "59 min 59 s"), (47 * 3600, "47 h 0 min"), (800_000, "9 d 6 h")],
)
def test_durations(seconds, text):
    assert names.duration(seconds) == text


@pytest.mark.parametrize(
    ("expected", "shown"),
    [
        (
            Expected(step_time=2.0, gflop_per_token=60.0, peak_tflops=312.0),
            "MFU 38.5 % (48.1 % planned)",
        ),
        (Expected(step_time=2.0), "80 % of the planned speed"),
        (Expected(gflop_per_token=600.0), ""),
    ],
)
def test_measured_against_planned(expected, shown):
    known = plan()
    line = ProgressLine()
    line.expect(replace(known, job=replace(known.job, expected=expected)))
    line.add(report(1, 0.0, tokens=0))
    line.add(report(5, 10.0, tokens=80_000))
    assert ("planned" in line.text) == bool(shown)
    assert shown in line.text


def test_the_lowest_rank_is_shown():
    follower = ProgressLine()
    assert follower.add(report(5, 0.0, "rank-7"))
    assert follower.add(report(4, 0.0, "rank-0"))
    assert not follower.add(report(9, 1.0, "rank-7"))
    assert follower.text.startswith("step 4 of")


def shown(reports, json=False):
    out, err = Capture(), Capture()
    view = make_view(out.stream, err.stream, Filters(), lambda: None, json=json)
    view.on_event(events.RunLaunched("demo-1", plan(), "/runs/demo-1"))
    for one in reports:
        planned = isinstance(one, events.AttemptPlanned)
        view.on_event(one if planned else events.ProgressReported("node0", one))
    view.on_event(events.Finished(DONE))
    assert view.wait(HANG)
    return out.text(), err.text()


def test_plain_output_has_few_lines_and_the_last_step():
    reports = [report(step, step * 0.5, total=50) for step in range(1, 51)]
    _, err = shown(reports)
    steps = [line for line in err.splitlines() if "step" in line]
    assert [line.split()[2] for line in steps] == ["1", "21", "41", "50"]
    assert steps[-1] == "dtrain: step 50 of 50 · loss 2 · 2.0 steps/s"
    _, err = shown([report(50, 0.5, f"rank-{rank}", total=50) for rank in (2, 1, 0)])
    assert err.count("dtrain: step 50 of 50") == 1


def test_the_same_step_of_the_next_attempt_is_shown():
    again = events.AttemptPlanned(replace(plan(), attempt=2))
    _, err = shown([report(1, 0.0), again, report(1, 60.0)])
    assert err.count("dtrain: step 1 of 100") == 2


@pytest.mark.parametrize("loss", [2.0, float("nan"), float("inf")])
def test_json_has_every_report(loss):
    out, _ = shown([report(1, 0.5, loss=loss, lr=loss), report(2, 0.6, "rank-1")], json=True)
    events = [json.loads(line, parse_constant=pytest.fail) for line in out.splitlines()]
    first, second = [event for event in events if event["event"] == "progress"]
    assert (first["host"], first["process"], first["step"]) == ("node0", "rank-0", 1)
    assert first["loss"] == first["metrics"]["lr"] == (2.0 if loss == 2.0 else None)
    assert second["process"] == "rank-1"


@pytest.mark.parametrize(
    ("keys", "job", "devices"),
    [("gpus: 8", "per: host", 16), ("gpus: 0, slots: 3", "per: gpu", 6), ("gpus: [1, 5]", "", 4)],
)
def test_the_devices_are_gpus_or_else_workers(keys, job, devices):
    job = f"framework: torch, script: a.py, {job}".rstrip(", ")
    text = f"cluster: {{hosts: [a, b], {keys}}}\njob: {{{job}}}\n"
    assert build(parse(text, "c.yaml")).devices == devices
