"""How long a host collects the stacks of a job that hangs."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from dtrain.node.agent import diagnosis, nccl_ras, stacks
from dtrain.node.agent.sweep import ABORT_LIMIT
from dtrain.session.hang_watch import STACKS_SECONDS
from support.limits import HANG


def test_a_host_answers_before_the_launcher_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL, py-spy and the flight recorder all take as long as they may."""
    now = [0.0]

    def spend(seconds: float, found: Any = None) -> Any:
        now[0] += seconds
        return found

    monkeypatch.setattr(diagnosis, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=spend))
    monkeypatch.setattr(diagnosis, "KernelLog", SimpleNamespace)
    monkeypatch.setattr(diagnosis, "query", lambda *_: spend(nccl_ras.LIMIT, ""))
    monkeypatch.setattr(diagnosis, "spy", lambda _: spend(stacks.SPY_LIMIT, {}))
    done = threading.Event()
    events: Any = SimpleNamespace(append=lambda kind: done.set())
    flights: Any = SimpleNamespace(request_dump=lambda rank: True, new_dumps=list)
    process: Any = SimpleNamespace(pid=7)
    one = diagnosis.Diagnosis(events, flights, ("127.0.0.1", 28028))
    one.collect_stacks([({"rank": 0}, process)], abort=False, ras=True)
    assert done.wait(HANG)
    assert now[0] + ABORT_LIMIT < STACKS_SECONDS
