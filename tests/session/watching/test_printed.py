"""Progress in the output of workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from dtrain.launchplan.build import build
from dtrain.launchplan.plan import LaunchPlan
from dtrain.runs import events
from dtrain.runs.folder import RunFolder
from dtrain.runs.journal import JournalReader
from dtrain.runs.log_store import Stream
from dtrain.runs.progress import Progress
from dtrain.session.reporting.observer import Observer
from dtrain.session.reporting.recorder import Recorder
from dtrain.session.watching.printed import MAX_LINE, PrintedProgress
from dtrain.session.watching.reports import ProgressReports
from dtrain.spec.load import parse

HOSTS = "cluster: {hosts: [a, b], slots: 2}\n"
JOB = 'job: {framework: none, script: t.py, progress: {line: "step {step} loss {loss}", total: 9}}'


class Reader(PrintedProgress):
    """Keeps the reports."""

    def __init__(self, text: str = JOB) -> None:
        super().__init__(planned(text), self.keep)
        self.said: list[Progress] = []

    def keep(self, host: str, file: str, fields: Any) -> None:
        assert fields["printed"]
        self.said.append(Progress.read(file.removesuffix(".progress"), fields))


class Shown(Observer):
    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_event(self, event: events.RunEvent) -> None:
        if isinstance(event, events.ProgressReported):
            self.steps.append(event.report.step)


def planned(text: str = JOB) -> LaunchPlan:
    return build(parse(HOSTS + text, "cluster.yaml"), run="run")


def stream(rank: int, fd: Literal["stdout", "stderr"] = "stdout", host: str = "a") -> Stream:
    return Stream(host, "worker", rank, rank, fd, Path("unused"))


def report(reader: Reader, stream: Stream, piece: bytes) -> Progress | None:
    reader.said.clear()
    reader.add(stream, piece)
    return reader.said[0] if reader.said else None


def step(reader: Reader, stream: Stream, piece: bytes) -> int | None:
    found = report(reader, stream, piece)
    return None if found is None else found.step


def test_the_last_line_of_a_piece_is_a_report_of_the_job() -> None:
    found = report(Reader(), stream(3), b"step 1 loss 5\nstep 2 loss 4.5\nsaved\n")
    assert found is not None
    assert (found.process, found.step, found.total, found.loss) == ("rank-0", 2, 9, 4.5)


def test_lines_in_pieces_with_colors_and_of_a_progress_bar() -> None:
    reader = Reader()
    assert step(reader, stream(0), b"step 1\x1b[32m 2 loss") is None
    assert step(reader, stream(0, "stderr"), b"step 7 loss 1\n") == 7
    assert step(reader, stream(0), b" 4\rstep 13 loss 4\r") == 13
    assert step(reader, stream(0), b"\x1b[1mstep \x1b[0m14 \x1b[32mloss 3\x1b[0m\n") == 14


def test_the_step_and_the_loss_on_lines_of_their_own() -> None:
    """Of a progress bar on stderr and a log on stdout, and never of another bar."""
    lines = """["| {step}/9 [", "'loss': '{loss}'"]"""
    reader = Reader(JOB.replace('"step {step} loss {loss}"', lines))
    assert report(reader, stream(0), b"{'loss': '4.5'}\n") is None
    found = report(reader, stream(0, "stderr"), b" 1%|# | 1/9 [0:01\r 2%|# | 2/9 [0:02\r")
    assert found is not None
    assert (found.step, found.total, found.loss) == (2, 9, None)
    printed_at = found.time
    found = report(reader, stream(0), b"{'loss': '4.4'}\n{'loss': '4.3'}\n")
    assert found is not None
    assert (found.step, found.loss, found.time) == (2, 4.3, printed_at)
    found = report(reader, stream(0, "stderr"), b"shards: 1%|# | 1/1 [0:01\r 3%|# | 3/9 [0:02\r")
    assert found is not None
    assert (found.step, found.loss) == (3, 4.3)
    assert report(reader, stream(1), b"{'loss': '9'}\n") is None


def test_an_endless_line_takes_little_memory() -> None:
    reader = Reader()
    for _ in range(100):
        reader.add(stream(0), b"." * MAX_LINE)
    assert sum(map(len, reader._unfinished.values())) <= MAX_LINE


def test_the_lowest_rank_that_prints_counts() -> None:
    reader = Reader()
    line = b"step 5 loss 1\n"
    assert step(reader, stream(2), line) == 5
    assert step(reader, stream(3), line) is None
    assert step(reader, stream(1), line) == 5
    assert step(reader, stream(2), line) is None


def test_the_last_step_in_the_journal_is_that_of_the_lowest_rank(tmp_path: Path) -> None:
    """Also if a rank on another host has printed first."""
    folder, plan = RunFolder(tmp_path), planned()
    reports = ProgressReports(plan, Recorder(folder, Observer()))
    for number in (1, 2):
        reports.add_output(stream(3, host="b"), b"step %d loss 1\n" % number)
    for number in range(1, 6):
        reports.add_output(stream(0), b"step %d loss 1\n" % number)
    reports.close()
    journaled = [event for _, event in JournalReader(folder.journal).read()]
    assert [one.report.step for one in journaled if isinstance(one, events.Progressed)] == [1, 5]


def test_what_is_printed_does_not_count_if_workers_report_their_progress(tmp_path: Path) -> None:
    folder, plan = RunFolder(tmp_path), planned()
    shown = Shown()
    reports = ProgressReports(plan, Recorder(folder, shown))
    said = {"event": "progress", "time": 1.0, "total": 9, "loss": 1.0, "tokens": None}
    steps = {"event": "steps", "done": 1, "waits": None, "group": 1, "blocks": [], "time": 1.0}
    reports.add("a", "rank-0.progress", steps)
    for number in (1, 2, 3):
        reports.add_output(stream(0), b"step %d loss 1\n" % number)
        if number > 1:
            reports.add("a", "rank-0.progress", {**said, "metrics": {}, "step": number})
    assert shown.steps == [1, 2, 2, 3]


def test_a_worker_that_reports_its_progress_replaces_a_lower_rank_that_prints(
    tmp_path: Path,
) -> None:
    """As the last stage of a pipeline."""
    folder, plan = RunFolder(tmp_path), planned()
    reports = ProgressReports(plan, Recorder(folder, Observer()))
    reports.add_output(stream(0), b"step 7 loss 1\n")
    assert reports.step == 7
    said = {"event": "progress", "time": 1.0, "total": 9, "loss": 1.0, "tokens": None}
    reports.add("b", "rank-3.progress", {**said, "metrics": {}, "step": 2})
    reports.close()
    assert reports.step == 2
    journaled = [event for _, event in JournalReader(folder.journal).read()]
    assert [one.report.step for one in journaled if isinstance(one, events.Progressed)] == [7, 2]


def test_an_evaluator_counts_only_if_no_worker_prints() -> None:
    reader = Reader()
    line = b"step 5 loss 1\n"
    evaluator = Stream("b", "evaluator", 0, None, "stdout", Path("unused"))
    assert step(reader, evaluator, line) == 5
    assert step(reader, Stream("a", "worker", 1, None, "stdout", Path("unused")), line) == 5
    assert step(reader, evaluator, line) is None


def test_without_the_key_nothing_is_read() -> None:
    reader = Reader("job: {framework: none, script: t.py}")
    assert step(reader, stream(0), b"step 5 loss 1\n") is None
