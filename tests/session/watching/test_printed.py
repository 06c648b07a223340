"""Progress in the output of workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from dtrain.launchplan.build import build
from dtrain.runs.log_store import Stream
from dtrain.runs.progress import Progress
from dtrain.session.watching.printed import MAX_LINE, PrintedProgress
from dtrain.spec.load import parse

HOSTS = "cluster: {hosts: [a, b], slots: 2}\n"
JOB = 'job: {framework: none, script: t.py, progress: {line: "step {step} loss {loss}", total: 9}}'


def printed(text: str = JOB) -> PrintedProgress:
    return PrintedProgress(build(parse(HOSTS + text, "cluster.yaml"), run="run"))


def stream(rank: int, fd: Literal["stdout", "stderr"] = "stdout") -> Stream:
    return Stream("a", "worker", rank, rank, fd, Path("unused"))


def steps(found: tuple[str, dict[str, Any]] | None) -> int | None:
    return None if found is None else Progress.read("rank-0", found[1]).step


def test_the_last_line_of_a_piece_is_a_report_of_the_job() -> None:
    found = printed().read(stream(3), b"step 1 loss 5\nstep 2 loss 4.5\nsaved\n")
    assert found is not None
    file, fields = found
    report = Progress.read(file.removesuffix(".progress"), fields)
    assert (report.process, report.step, report.total, report.loss) == ("rank-0", 2, 9, 4.5)


def test_lines_in_pieces_with_colors_and_of_a_progress_bar() -> None:
    reader = printed()
    assert steps(reader.read(stream(0), b"step 1\x1b[32m 2 loss")) is None
    assert steps(reader.read(stream(0, "stderr"), b"step 7 loss 1\n")) == 7
    assert steps(reader.read(stream(0), b" 4\rstep 13 loss 4\r")) == 13
    assert steps(reader.read(stream(0), b"\x1b[1mstep \x1b[0m14 \x1b[32mloss 3\x1b[0m\n")) == 14


def test_an_endless_line_takes_little_memory() -> None:
    reader = printed()
    for _ in range(100):
        reader.read(stream(0), b"." * MAX_LINE)
    assert sum(map(len, reader._unfinished.values())) <= MAX_LINE


def test_the_lowest_rank_that_prints_counts() -> None:
    reader = printed()
    line = b"step 5 loss 1\n"
    assert steps(reader.read(stream(2), line)) == 5
    assert steps(reader.read(stream(3), line)) is None
    assert steps(reader.read(stream(1), line)) == 5
    assert steps(reader.read(stream(2), line)) is None


def test_without_the_key_nothing_is_read() -> None:
    reader = printed("job: {framework: none, script: t.py}")
    assert reader.read(stream(0), b"step 5 loss 1\n") is None
