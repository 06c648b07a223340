"""What the user sees of a run's journal."""

import threading
import time
from pathlib import Path

import pytest

from dtrain.runs.folder import RunFolder
from dtrain.runs.journal import JournalReader
from dtrain.session.reporting import recorder as recorders
from dtrain.session.reporting.observer import Observer
from dtrain.session.reporting.recorder import Recorder
from support.limits import HANG


class Notices(Observer):
    def __init__(self) -> None:
        self.shown: list[str] = []
        self.any = threading.Event()

    def notice(self, text: str) -> None:
        self.shown.append(text)
        self.any.set()


def test_a_journal_that_cannot_be_written_is_one_notice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    folder = RunFolder.create("job-20261121-120000-abcdef")
    folder.journal.mkdir()
    recorder = Recorder(folder, notices := Notices())
    recorder.notice("one")
    recorder.notice("two")
    lost, *others = notices.shown
    assert lost.startswith("the run's journal cannot be written: Is a directory; ")
    assert others == ["one", "two"]


def test_the_journal_goes_on_evenly_if_the_time_of_day_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    folder = RunFolder.create("job-20261121-120000-abcdef")
    recorder = Recorder(folder, Notices())
    recorder.notice("one")
    monkeypatch.setattr(time, "time", lambda: 0.0)
    recorder.notice("two")
    (one, _), (two, _) = JournalReader(folder.journal).read()
    assert one <= two < one + HANG


def test_a_long_wait_says_once_what_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    recorder = Recorder(RunFolder.create("job-20261121-120000-abcdef"), notices := Notices())
    monkeypatch.setattr(recorders, "SLOW", 0.0)
    for _ in range(2):
        before = {*threading.enumerate()}
        with recorder.awaited("Slurm"):
            assert notices.any.wait(HANG)
            for timer in {*threading.enumerate()} - before:
                timer.join(HANG)
    assert notices.shown == ["waiting for Slurm"]


def test_a_short_wait_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    recorder = Recorder(RunFolder.create("job-20261121-120000-abcdef"), notices := Notices())
    before = {*threading.enumerate()}
    with recorder.awaited("Slurm") as answered:
        (timer,) = {*threading.enumerate()} - before
        answered()
        timer.join(HANG)
        assert not timer.is_alive()
    assert notices.shown == []


def test_a_wait_that_ends_as_its_notice_is_due_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()

    class Expired(threading.Timer):
        """It cannot be cancelled any more, and its thread comes late."""

        def run(self) -> None:
            assert over.wait(HANG)
            self.function(*self.args, **self.kwargs)

    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    recorder = Recorder(RunFolder.create("job-20261121-120000-abcdef"), notices := Notices())
    monkeypatch.setattr(threading, "Timer", Expired)
    before = {*threading.enumerate()}
    with recorder.awaited("Slurm"):
        (timer,) = {*threading.enumerate()} - before
    over.set()
    timer.join(HANG)
    assert notices.shown == []
