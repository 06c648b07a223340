"""What a run's journal tells a launcher that takes the run over."""

from __future__ import annotations

from pathlib import Path

from dtrain.messages.agent import Exited
from dtrain.runs.journal import HostEvent, Journal, NextAttempt, RunStarted
from dtrain.runs.log_store import RunFolder
from dtrain.session import history


def exited(index: int, code: int = 0, *, stopping: bool = False) -> Exited:
    return Exited(1.0, "worker", index, index, 7, code, None, stopping)


def test_the_processes_that_have_finished_their_work(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    journal = Journal(folder.journal)
    journal.write(1.0, RunStarted("run", ("a", "b")))
    journal.write(1.0, HostEvent("a", 1, exited(0).as_json()))
    journal.write(1.0, NextAttempt(2, ("a", "b")))
    ends = [exited(0), exited(1, 1), exited(2, stopping=True), exited(3)]
    for offset, event in enumerate(ends):
        journal.write(1.0, HostEvent("a" if event.index < 3 else "b", offset, event.as_json()))
    journal.write(1.0, HostEvent("b", 9, {"event": "exited", "damaged": True}))
    journal.write(1.0, HostEvent("b", 9, ["no event"]))
    assert history.finished(folder) == {"a": [exited(0)], "b": [exited(3)]}
