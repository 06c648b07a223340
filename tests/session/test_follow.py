"""A run that is shown from its folder, while another process writes to it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dtrain.launchplan.plan import LaunchPlan
from dtrain.runs import events, journal
from dtrain.runs.folder import RunFolder
from dtrain.session.follow import RunFollower
from dtrain.session.observer import NullObserver
from support.stored import RECORD, REQUEST

FILE = "cluster: {slurm: {}, nodes: 2, gpus: 1}\njob: {framework: torch, script: train.py}\n"
QUEUED = replace(RECORD, request=replace(REQUEST, text=FILE), attempt=1, replaced={}, leftovers=())


class Watching(NullObserver):
    def __init__(self) -> None:
        self.hosts: list[tuple[str, ...]] = []

    def allocated(self, plan: LaunchPlan) -> None:
        self.hosts.append(plan.host_names)


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
