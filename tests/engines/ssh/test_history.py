"""What a run's journal tells a launcher that takes the run over."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dtrain.engines.ssh import history
from dtrain.messages.agent import Exited, Happened
from dtrain.runs.events import HostEvent, NextAttempt, RunStarted
from dtrain.runs.folder import RunFolder
from dtrain.runs.journal import Journal, JournalReader
from dtrain.runs.observed import ObservedRun
from dtrain.session.beginning import earlier_run
from dtrain.session.caller import Caller
from support.stored import RECORD


def exited(index: int, code: int = 0) -> Exited:
    return Exited(1.0, "worker", index, index, 7, code, None, stopping=False)


def test_what_hosts_have_reported_of_the_latest_attempt(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    journal = Journal(folder.journal)
    journal.write(1.0, RunStarted(("a", "b")))
    journal.write(1.0, HostEvent("a", 1, exited(0).as_json()))
    journal.write(1.0, NextAttempt(2, ("a", "b")))
    for offset, event in enumerate([exited(0), exited(1, 1), exited(2)]):
        host = "a" if event.index < 2 else "b"
        journal.write(2.0 + offset, HostEvent(host, offset, event.as_json()))
    journal.write(9.0, HostEvent("b", 9, {"event": "exited", "damaged": True}))
    journal.write(9.0, HostEvent("b", 9, ["no event"]))
    assert history.reported(ObservedRun.read(folder).attempt) == {
        "a": [(2.0, Happened(0, exited(0))), (3.0, Happened(1, exited(1, 1)))],
        "b": [(4.0, Happened(2, exited(2)))],
    }


def test_a_launcher_killed_before_it_journals_the_next_attempt(tmp_path: Path) -> None:
    """It has saved the record of attempt 2, and the journal ends with what attempt 1 reported."""
    record = replace(RECORD, attempt=2, dropped={"c": 2}, replaced={})
    host = record.plan.host_names[0]
    folder = RunFolder(tmp_path)
    Journal(folder.journal).write(1.0, HostEvent(host, 9, exited(0, 1).as_json()))
    for _ in range(2):
        with earlier_run(record, folder, Caller()) as current:
            known = ObservedRun.read(current).attempt
            assert history.reported(known) == {}
            assert not any(history.received(known, current, record.plan).values())
    events = [event for _, event in JournalReader(folder.journal).read()]
    begun = [event for event in events if isinstance(event, NextAttempt)]
    assert begun == [NextAttempt(2, record.plan.host_names)]
