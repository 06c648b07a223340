"""The page of `dtrain report --html`, in a real browser."""

from __future__ import annotations

import contextlib
import json
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest

from dtrain.diagnostics import ExitCode
from dtrain.failures.cause import Report
from dtrain.messages.agent import Revision
from dtrain.messages.telemetry import GpuSample, Sample
from dtrain.runs import events, journal, restart
from dtrain.runs.folder import RunFolder
from dtrain.runs.progress import Progress
from dtrain.runs.record import Record
from dtrain.runs.request import Request
from dtrain.runs.summary import Summary, TimelineEntry, summary
from dtrain_cli.views.paper import Paper
from dtrain_cli.views.summary import as_json, as_text, comparison
from dtrain_cli.views.summary_html import page
from support.browser import Browser
from support.stored import FAILURE, STRAGGLER

HOSTILE = "</title><script>alert(1)</script> \"'&\x1b[31m<img src=//example.com/x>"
BEGIN = 1.7e9
AHEAD = {"n1": 0, "n2": 3600}
"""Seconds by which the hosts' clocks are ahead."""
FILE = f"""
# {HOSTILE}
cluster: {{hosts: [n1, n2], gpus: 2}}
job:
  framework: torch
  script: train.py
  expected: {{step_time: 1.0, memory_gib: 40, gflop_per_token: 10, peak_tflops: 100}}
""".replace("\x1b", "")


def sample(at: float, use: float) -> Sample:
    gpus = tuple(
        GpuSample(one, use, 40000, 81920, 500, 700, 60, 1400, 1980, 0, 0, 0) for one in (0, 1)
    )
    return Sample(BEGIN + at, 8, 2.0, (10**9, 10**10), None, None, None, gpus, ())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Summary:
    """Two attempts: a failure after 100 s, and 200 s that end the job."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DTRAIN_HOME", str(tmp_path_factory.mktemp("home")))
        folder = RunFolder.create("run-1")
        request = Request("c.yaml", "/", FILE, (HOSTILE,), settings=("job.grace=9s",))
        Record("run-1", request, 29500, "python3", BEGIN).save(folder.path)
        written: list[tuple[float, events.JournalEvent]] = [
            (0, events.RunStarted(("n1", "n2"))),
            *((1, events.RelayHello(host, {"time": BEGIN + 1 + AHEAD[host]})) for host in AHEAD),
            *((at, progress(at, at - 19)) for at in range(20, 101, 10)),
            (100, events.StragglersChanged(STRAGGLER)),
            (102, events.NoticeShown(HOSTILE)),
            (104, failed()),
            (110, events.NextAttempt(2, ("n1", "n2"))),
            *((at, progress(at, at - 69)) for at in range(120, 311, 10)),
            (320, events.Finished(end())),
        ]
        lines = [journal.encode(BEGIN + at, event) for at, event in written]
        folder.journal.write_bytes(b"".join(lines))
        (folder.path / "telemetry").mkdir(mode=0o700)
        for host, use in (("n1", 80), ("n2", 20)):
            times = range(10 + AHEAD[host], 320 + AHEAD[host], 10)
            stored = [json.dumps(sample(at, use).as_json()) for at in times]
            file = folder.path / "telemetry" / f"{host}.jsonl"
            file.write_text("\n".join([*stored, ""]))
            file.chmod(0o600)
        return summary(folder, BEGIN + 1000)


def progress(at: int, step: int) -> events.Progressed:
    report = Progress("rank-0", BEGIN + at, step, 400, 5.0 / step, 1000 * step, {})
    return events.Progressed(report)


def failed() -> events.AttemptFailed:
    failure = replace(FAILURE, time=BEGIN + 100)
    report = Report(ExitCode.JOB_FAILED, HOSTILE, failures=(failure,))
    return events.AttemptFailed(1, restart.AttemptResult(True, 81, "n2"), report)


def end() -> Report:
    lines = "Traceback (most recent call last):\n" + "x" * 500 + f"\nValueError: {HOSTILE}\n"
    failure = replace(FAILURE, time=BEGIN + 310, traceback=lines, kernel=None)
    return Report(
        ExitCode.JOB_FAILED, HOSTILE, (failure,), problems=(HOSTILE,), hint=HOSTILE, seconds=320
    )


def test_the_summary_has_the_numbers_of_the_run(run: Summary) -> None:
    spent = run.goodput.seconds
    assert (spent["start"], spent["lost"]) == pytest.approx((30, 31), abs=0.01)
    assert (spent["steps"], spent["waiting"], spent["other"]) == pytest.approx(
        (239, 6, 14), abs=0.1
    )
    measured = {one.what: (one.planned, one.measured) for one in run.differences}
    assert measured == {"step time": (1.0, 1.0), "MFU": (2.5, 2.5), "peak memory": (40, 39.0625)}
    assert run.differs == ""


def test_nothing_is_said_twice(run: Summary) -> None:
    text = re.sub(r"<[^>]*>", "", page(run).partition("<body>")[2])
    assert text.count(run.record.run) == 1 + text.count(f"runs/{run.record.run}")
    assert text.count("of the time went into steps") == 1


def test_telemetry_has_the_launchers_time(run: Summary) -> None:
    for samples in run.samples.values():
        assert [one.time - BEGIN for one in samples] == pytest.approx(range(10, 320, 10))


def test_a_run_that_goes_on_has_not_failed(run: Summary) -> None:
    going = replace(run, ended=None, state="running")
    paper = Paper(80, color=False, unicode=True)
    for one, over in ((run, True), (going, False)):
        text = as_text(one, paper)
        assert ("dtrain: failed after 5 min 20 s" in text) == over
        assert "\x1b" not in text
        assert "rank 3 on n2" in text and "\n\n\n" not in text
        assert ("<h2>First cause</h2>" in page(one)) == over
        assert "Settings: job.grace=9s" in page(one)
    assert "State    running" in as_text(going, paper)


def test_nothing_is_said_about_the_time_without_a_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path / "home"))
    folder = RunFolder.create("run-2")
    Record("run-2", Request("c.yaml", "/", FILE, ()), 29500, "python3", BEGIN).save(folder.path)
    written = [(at, progress(at, at - 19)) for at in range(20, 101, 10)]
    lines = [journal.encode(BEGIN, events.RunStarted(("n1", "n2")))]
    lines += [journal.encode(BEGIN + at, event) for at, event in written]
    folder.journal.write_bytes(b"".join(lines))
    folder.journal.chmod(0o600)
    paper = Paper(80, color=False, unicode=True)
    left = summary(folder, BEGIN + 1e6)
    assert left.goodput.wall == 100
    text = as_text(left, paper)
    assert "State    unattended\n" in text and "Took     1 min 40 s\n" in text
    assert "Launcher none; `dtrain attach run-2` takes charge" in text
    claim = folder.claim()
    assert claim is not None
    with contextlib.ExitStack() as stack:
        stack.callback(claim.close)
        led = summary(folder, BEGIN + 1000)
    assert led.goodput.wall == 1000
    text = as_text(led, paper)
    assert "State    running\n" in text and "Launcher" not in text
    assert json.loads(as_json([led]))["runs"][0]["state"] == "running"


def test_a_reader_elsewhere_knows_the_time_zone(
    run: Summary, monkeypatch: pytest.MonkeyPatch
) -> None:
    paper = Paper(80, color=False, unicode=True)
    try:
        for zone, began in (("CET-1", "23:13:20 +0100"), ("<-0330>3:30", "18:43:20 -0330")):
            monkeypatch.setenv("TZ", zone)
            time.tzset()
            assert f"Began    2023-11-14 {began}\n" in as_text(run, paper)
            assert f"2023-11-14 {began}<" in page(run).replace("&#43;", "+")
    finally:
        monkeypatch.undo()
        time.tzset()


def test_a_rank_that_is_slow_by_its_gpu_has_no_step(run: Summary) -> None:
    found = replace(STRAGGLER, step=0, measured="activity")
    slow = replace(run, slow=((BEGIN, found), (BEGIN, STRAGGLER)))
    for text in (as_text(slow, Paper(200, color=False, unicode=True)), page(slow)):
        assert "(step 0)" not in text
        assert f"(step {STRAGGLER.step:,})" in text


def test_short_times_and_hints_are_readable(run: Summary) -> None:
    hint = TimelineEntry(BEGIN + 3, "warning: slow disk\n  hint: use another")
    text = as_text(replace(run, events=(hint,)), Paper(80, color=False, unicode=True))
    assert "waiting" in text and " 6.0 s " in text
    assert "+3.0 s  warning: slow disk\n" in text and "  hint: use another\n" in text
    long = replace(hint, text="warning: slow disk\n  hint: " + "use another " * 9)
    narrow = Paper(60, color=False, unicode=True, terminal=True)
    lines = as_text(replace(run, events=(long,)), narrow).splitlines()
    at = next(number for number, line in enumerate(lines) if "hint: use" in line)
    assert {len(line) - len(line.lstrip()) for line in lines[at : at + 3]} == {8}


def test_a_stop_is_one_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    folder = RunFolder.create("run-2")
    Record("run-2", Request("c.yaml", "/", FILE), 29500, "python3", BEGIN).save(folder.path)
    written = journal.Journal(folder.journal)
    for event in (events.StopRequested("Ctrl-C"), events.NoticeShown("Ctrl-C: stopping")):
        written.write(BEGIN, event)
    found = summary(folder, BEGIN + 1)
    assert [one.text for one in found.events] == ["Ctrl-C: stopping"]
    assert found.hosts == ("n1", "n2")  # as planned: the journal does not name them


def test_hosts_without_names_are_only_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    folder = RunFolder.create("run-2")
    file = FILE.replace("hosts: [n1, n2]", "slurm: {}, nodes: 2")
    Record("run-2", Request("c.yaml", "/", file), 29500, "python3", BEGIN).save(folder.path)
    written = journal.Journal(folder.journal)
    written.write(BEGIN, events.RunStarted(("node0", "node1")))
    text = as_text(summary(folder, BEGIN + 1), Paper(80, color=False, unicode=True))
    assert "Hosts    2 hosts: 4 workers" in text


def test_the_comparison_fits_a_terminal(run: Summary) -> None:
    long = replace(run, record=replace(run.record, run="x" * 60))
    text = comparison(run, long, Paper(80, color=False, unicode=True))
    rows = [line.split() for line in text.splitlines()]
    assert ["wall", "time", "5", "min", "20", "s", "5", "min", "20", "s", "1.00"] in rows
    assert ["second", "x" * 60, "n[1-2]", "failed"] in rows
    text = comparison(run, replace(run, curve=()), Paper(80, color=False, unicode=True))
    assert ["last", "loss", "0.02075", "-"] in [line.split() for line in text.splitlines()]
    assert max(len(line) for line in text.splitlines()[4:]) < 80


def test_the_comparison_shows_how_the_requests_differ(run: Summary) -> None:
    request = replace(run.record.request, args=())
    run = replace(run, record=replace(run.record, request=request))
    changed = replace(
        request, text=request.text.replace("train.py", "other.py"), args=("--lr", "1")
    )
    paper = Paper(80, color=False, unicode=True)
    other = replace(run, record=replace(run.record, request=changed))
    shown = comparison(run, other, paper).split("\n\n")[1].splitlines()
    assert shown == ["-   script: train.py", "+   script: other.py", "+ args: --lr 1"]
    longer = replace(changed, settings=tuple(f"job.env.A{number}=1" for number in range(40)))
    many = comparison(run, replace(run, record=replace(run.record, request=longer)), paper)
    assert many.split("\n\n")[1].endswith("\nand 24 more lines")
    assert len(comparison(run, run, paper).split("\n\n")) == 2
    known = replace(run, code=Revision("ab" * 20))
    assert "\n- code: unknown\n+ code: commit abababababab\n" in comparison(run, known, paper)


def test_a_week_of_a_large_cluster_stays_small(run: Summary) -> None:
    """Neighbors in the heat map differ, so that none is merged."""
    week = 7 * 86400.0
    one = tuple(sample(week * part / 480, 50 + 40 * (part // 4 % 2)) for part in range(480))
    curve = tuple(
        replace(run.curve[1], time=BEGIN + week * part / 60_000, loss=float(part % 7))
        for part in range(60_000)
    )
    samples = {f"gpu{number:03}": one for number in range(128)}
    text = page(replace(run, ended=BEGIN + week, until=BEGIN + week, curve=curve, samples=samples))
    assert text.count("<rect") > 128 * 100
    assert len(text.encode()) < 5e6


def test_samples_fill_the_time_that_they_are_for(run: Summary) -> None:
    """Also in a short run, whose heat map has more parts than samples; n2 was away for a while."""
    times = {"n1": range(3, 90, 10), "n2": (3, 13, 23, 63, 73, 83)}
    samples = {host: tuple(sample(at, 40) for at in found) for host, found in times.items()}
    fuller = [replace(one, memory_used=60000) for one in samples["n2"][0].gpus]
    samples["n2"] = tuple(replace(one, gpus=tuple(fuller)) for one in samples["n2"])
    text = page(replace(run, ended=BEGIN + 93, until=BEGIN + 93, samples=samples))
    heat = text[text.index('<div class="heat">') :]
    rows = re.findall(r'<div class="row">.*?</svg>', heat, re.DOTALL)
    assert [row.count("<rect") for row in rows[:2]] == [1, 2]
    least, most = re.findall(r'<polyline points="([^"]*)"', text)[-2:]
    assert least != most
    assert {one.split(",")[1] for one in least.split()} == {"33.33"}  # not up and down again
    marks = re.findall(r'<div class="row"><span>(\d [a-z]+)<', page(replace(run, state="stopped")))
    assert marks == ["1 failed", "2 stopped"]


def test_the_curves_of_a_short_run_end_with_it(run: Summary) -> None:
    samples = {"n1": (sample(3, 40),), "n2": (sample(5, 40),)}
    text = page(replace(run, ended=BEGIN + 6, until=BEGIN + 6, samples=samples))
    memory = text[text.index("<h3>Memory of") :]
    assert re.findall(r'<th scope="row">(\+[^<]*)<', memory)[0] == "+4.0 s"


def test_a_loss_that_explodes_still_has_a_curve(run: Summary) -> None:
    losses = (1.0, -1e308, 1e308, float("inf"), 5e-324)
    curve = tuple(replace(point, loss=loss) for point, loss in zip(run.curve, losses, strict=False))
    places = re.findall(r'<polyline points="([^"]*)"', page(replace(run, curve=curve)))[0]
    heights = [float(place.partition(",")[2]) for place in places.split()]
    assert heights == [50, 100, 0, 50]


@pytest.mark.browser
def test_it_is_readable_and_runs_nothing(run: Summary, tmp_path_factory) -> None:
    file = tmp_path_factory.mktemp("page") / "run.html"
    file.write_text(page(run), encoding="utf-8")
    with Browser(tmp_path_factory.mktemp("browser")) as browser:
        for width, dark in ((400, False), (1600, True)):
            browser.show(file, width, dark=dark)
            assert browser.evaluate("document.documentElement.scrollWidth") <= width
        sent = {url for url in browser.requests if not url.startswith(("data:", "about:"))}
        assert sent == {file.as_uri()}
        assert browser.console == []
        assert browser.evaluate("document.querySelectorAll('script, img, iframe').length") == 0
        text = browser.evaluate("document.body.innerText")
        assert text.count("<script>alert(1)</script>") >= 4
        assert browser.evaluate("document.title").startswith("run-1")
        # Each chart has a description, and a table with its numbers.
        hidden = "[...document.querySelectorAll('svg')].every(o => o.ariaHidden || o.ariaLabel)"
        assert browser.evaluate(hidden)
        widths = browser.evaluate(
            "[...document.querySelectorAll('#goodput .bar rect')]"
            ".map(one => [+one.dataset.seconds, one.getBoundingClientRect().width])"
        )
        whole = browser.evaluate("document.querySelector('#goodput .bar').clientWidth")
        assert sum(seconds for seconds, _ in widths) == pytest.approx(320, rel=1e-4)
        for seconds, width in widths:
            assert width == pytest.approx(seconds / 320 * whole, abs=0.2)
        rows = browser.evaluate("document.querySelectorAll('#heat table tbody tr').length")
        assert rows == 2
