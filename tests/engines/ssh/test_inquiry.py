"""The state of a run that hosts report without a launcher."""

from __future__ import annotations

import pytest

from dtrain.engines.ssh import inquiry
from dtrain.runs.record import Record
from dtrain.runs.request import Request
from dtrain.runs.shown_state import ShownState
from support.limits import HANG
from support.scripted import SilentHost

FILE = "cluster: {hosts: [silent], gpus: 1}\njob: {framework: none, script: train.py}\n"


def test_nobody_waits_for_a_host_that_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inquiry, "LIMIT", 0.0)
    host = SilentHost()
    record = Record("run", Request("cluster.yaml", "/", FILE), 29500, "python3", 0.0)
    found = inquiry.ask(record, {}, host)
    assert found["silent"].state is ShownState.UNREACHABLE
    assert host.closed.wait(HANG), "its thread would wait for ever"
