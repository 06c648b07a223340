"""The journal returns its events and survives damage."""

from __future__ import annotations

import errno
import json
import math
import os
import resource
from dataclasses import replace
from pathlib import Path

import pytest

from dtrain.diagnostics import UsageError
from dtrain.runs import events, journal
from dtrain.runs.journal import Journal, JournalReader, encode, read_line
from dtrain.runs.progress import Progress
from support.stored import END, EVENTS, FAILURE, REPORT


def test_the_sample_has_every_event() -> None:
    assert {type(event) for event in (*EVENTS, END)} == set(events.EVENTS.values())


@pytest.mark.parametrize("event", [*EVENTS, END], ids=lambda event: str(event.kind))
def test_what_is_written_is_read_back(event: events.JournalEvent) -> None:
    assert read_line(encode(5.0, event)) == (5.0, event)


def test_a_loss_that_diverged_is_kept() -> None:
    event = events.Progressed(Progress("rank-0", 1.0, 2, None, math.inf, None, {"g": -math.inf}))
    assert read_line(encode(5.0, event)) == (5.0, event)


def test_a_report_of_many_long_failures_is_shortened_so_that_it_can_be_read() -> None:
    failure = replace(FAILURE, traceback="x" * (1 << 20), message="é" * (1 << 20))
    report = replace(REPORT, failures=(failure,) * 100, hint="h" * (1 << 20))
    _, event = read_line(encode(5.0, events.Finished(report)))
    assert isinstance(event, events.Finished)
    assert len(event.report.failures) == 100
    assert event.report.failures[0].traceback
    assert not event.report.failures[-1].traceback


HOST = {"schema": 1, "time": 1.0, "event": "host", "host": "n1", "state": "running", "detail": ""}
BAD = {
    "not JSON": b"{",
    "binary": b"\x80\xff\x00{}",
    "a list": b"[]",
    "null": b"null",
    "deep": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "deep but balanced": b'{"schema":1,"x":' + b"[" * 500 + b"]" * 500 + b"}",
    "a long number": json.dumps(HOST).replace("1.0", "9" * 10_000).encode(),
    "Infinity": json.dumps(HOST | {"time": math.inf}).encode(),
    "NaN": json.dumps(HOST | {"time": math.nan}).encode(),
    "a huge time": json.dumps(HOST | {"time": 1e300}).encode(),
    "no schema": json.dumps({**HOST, "schema": None}).encode(),
    "another schema": json.dumps(HOST | {"schema": 2}).encode(),
    "no event": json.dumps({"schema": 1, "time": 1.0}).encode(),
    "an unknown event": json.dumps(HOST | {"event": "launched"}).encode(),
    "an event that is a list": json.dumps(HOST | {"event": []}).encode(),
    "no host": json.dumps({key: HOST[key] for key in HOST if key != "host"}).encode(),
    "a host that is a number": json.dumps(HOST | {"host": 5}).encode(),
    "a carriage return": b"\r",
    "an exit code that is none": encode(5.0, END).replace(b'"exit_code": 1', b'"exit_code": 77'),
    "a step that is infinite": encode(5.0, EVENTS[8]).replace(b'"step": 10', b'"step": Infinity'),
    "metrics that are a list": encode(5.0, EVENTS[8]).replace(b'{"lr": 0.0001}', b"[1]"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_damaged_line_is_skipped_and_counted(name: str, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    good = encode(5.0, EVENTS[0])
    path.write_bytes(good + BAD[name].rstrip(b"\n") + b"\n" + good)
    reader = JournalReader(path)
    assert [event for _, event in reader.read()] == [EVENTS[0]] * 2
    assert reader.unreadable == 1


def test_the_sizes_of_an_earlier_version_are_not_damage(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    line = {"schema": 1, "time": 5.0, "event": "sizes", "streams": {"logs/a/worker-0.out": 9}}
    path.write_text(json.dumps(line) + "\n")
    reader = JournalReader(path)
    assert list(reader.read()) == []
    assert reader.unreadable == 0


def test_a_line_that_is_too_long_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "MAX_LINE", 1000)
    path = tmp_path / "journal.jsonl"
    good = encode(5.0, EVENTS[0])
    reader = JournalReader(path)
    with path.open("ab", buffering=0) as file:
        file.write(good + b"x" * 2500)
        assert len(list(reader.read())) == 1
        file.write(b"x" * 2500 + b"\n" + b"y" * 1000 + b"\n" + good + b'{"torn')
        assert len(list(reader.read())) == 1
        assert reader.unreadable == 2
    Journal(path).write(6.0, EVENTS[0])
    assert [time for time, _ in reader.read()] == [6.0]
    assert reader.unreadable == 3


def test_an_event_that_fits_only_in_part_is_reported_as_lost(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    half = len(encode(5.0, END)) * 3 // 2
    resource.setrlimit(resource.RLIMIT_FSIZE, (half, before[1]))
    try:
        lost = [Journal(path).write(5.0, END) for _ in range(2)]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.stat().st_size == half
    assert [error and error.errno for error in lost] == [None, errno.ENOSPC]


def test_another_kind_of_file_in_its_place_is_an_error(tmp_path: Path) -> None:
    fifo, folder, link = tmp_path / "fifo", tmp_path / "folder", tmp_path / "link"
    os.mkfifo(fifo)
    folder.mkdir()
    link.symlink_to("/dev/zero")
    for path in (fifo, folder, link):
        with pytest.raises(UsageError, match="is not a regular file"):
            list(JournalReader(path).read())
        Journal(path).write(5.0, EVENTS[0])
    assert list(JournalReader(tmp_path / "missing").read()) == []
