"""A run that is shown from its folder, while another process writes to it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dtrain.failures.stalls import Stall
from dtrain.runs import events, journal
from dtrain.runs.folder import RunFolder
from dtrain.runs.journal import Journal
from dtrain.runs.log_store import Stream
from dtrain.runs.observed import ObservedRun
from dtrain.runs.progress import Progress
from dtrain.session.reporting.follow import RunFollower
from dtrain.session.reporting.observer import Observer
from dtrain_cli.views import Filters, make_view
from support.limits import HANG
from support.runs import Capture
from support.stored import RECORD, REQUEST

FILE = "cluster: {slurm: {}, nodes: 2, gpus: 1}\njob: {framework: torch, script: train.py}\n"
QUEUED = replace(RECORD, request=replace(REQUEST, text=FILE), attempt=1, replaced={}, leftovers=())


class Watching(Observer):
    def __init__(self) -> None:
        self.hosts: list[tuple[str, ...]] = []
        self.seen: list[object] = []
        """Notices, attempts that began, and attempts with new output."""

    def on_event(self, event: events.RunEvent) -> None:
        if isinstance(event, events.HostsPlanned):
            self.hosts.append(event.plan.host_names)
        if isinstance(event, events.AttemptPlanned):
            self.seen.append(("begins", event.plan.attempt))
        if isinstance(event, events.NoticeShown):
            self.seen.append(event.text)

    def output(self, stream: Stream, size: int) -> None:
        self.seen.append((stream.attempt, size))


@pytest.mark.parametrize(
    ("known", "shown"), [((), [("n1", "n2")]), (("n1", "n2"), [])], ids=["before", "after"]
)
def test_hosts_allocated_while_attach_begins(
    known: tuple[str, ...],
    shown: list[tuple[str, ...]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The record was read before or after the launcher stored the hosts; the journal, after."""
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    folder = RunFolder.create("run-1")
    record = replace(QUEUED, allocated=known)
    record.save(folder.path)
    folder.journal.write_bytes(journal.encode(1e9, events.HostsAllocated(("n1", "n2"))))
    watching = Watching()
    RunFollower(folder, record, watching).skip()
    assert watching.hosts == shown


def test_the_last_output_of_an_attempt_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the notice of its end, although the next one has begun since the last look."""
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    folder = RunFolder.create("run-1")
    record = replace(QUEUED, allocated=("n1", "n2"))
    record.save(folder.path)
    watching = Watching()
    follower = RunFollower(folder, record, watching)
    follower.skip()
    for attempt in (1, 2):
        file = replace(folder, attempt=attempt).logs / "n1" / "worker-0.out"
        file.parent.mkdir(parents=True)
        file.write_text("x" * attempt)
    written = Journal(folder.journal)
    written.write(1e9, events.NoticeShown("restarting"))
    written.write(1e9, events.NextAttempt(2, ("n1", "n2")))
    follower.read_new()
    assert watching.seen == [(1, 1), "restarting", ("begins", 2), (2, 2)]


def test_a_watcher_learns_of_another_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which ranks are slow or stand still is then unknown, until that launcher reports it."""
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    folder = RunFolder.create("run-1")
    QUEUED.save(folder.path)
    known = ObservedRun()
    observer = Observer()
    observer.on_event = lambda event: known.add(0.0, event)  # type: ignore[method-assign]
    follower = RunFollower(folder, QUEUED, observer)
    written = Journal(folder.journal)
    written.write(1e9, events.StallChanged(Stall(("rank-0",), ("n1",), 20.0, 3, 1)))
    follower.read_new()
    assert known.attempt.stall is not None
    written.write(1e9, events.LauncherAttached())
    follower.read_new()
    assert known.attempt.stall is None


def test_a_watcher_begins_with_the_last_progress_and_its_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    folder = RunFolder.create("run-1")
    QUEUED.save(folder.path)
    written = Journal(folder.journal)
    for step in (10, 20, 30):
        report = Progress("rank-0", 1e9 + step, step, 40, 2.0, None, {})
        written.write(1e9 + step, events.Progressed(report))
    out, err = Capture(), Capture()
    view = make_view(out.stream, err.stream, Filters(), lambda: None)
    follower = RunFollower(folder, QUEUED, view)
    follower.skip()
    follower.show_training()
    view.close()
    assert view.wait(HANG)
    line = "dtrain: step 30 of 40 · loss 2 · 1.0 steps/s · 10 s left"
    assert [text for text in err.text().splitlines() if "step" in text] == [line]
