"""What the user sees of a run's journal."""

from pathlib import Path

import pytest

from dtrain.runs.folder import RunFolder
from dtrain.session.observer import Observer
from dtrain.session.recorder import Recorder


class Notices(Observer):
    def __init__(self) -> None:
        self.shown: list[str] = []

    def notice(self, text: str) -> None:
        self.shown.append(text)


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
