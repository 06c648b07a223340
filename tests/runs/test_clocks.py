"""Clocks of hosts that differ from the launcher's."""

from __future__ import annotations

import pytest

from dtrain.runs.clocks import HostClocks
from dtrain.runs.events import HostEvent, JournalEvent, RelayHello

HOUR = 3600.0


def said(then: float, time: float, host: str = "n1") -> tuple[float, JournalEvent]:
    return then, HostEvent(host, 1, {"event": "started", "time": time})


def test_the_fastest_report_gives_the_offset() -> None:
    hello: JournalEvent = RelayHello("n1", {"python": "3.12.1", "time": HOUR + 10.9})
    clocks = HostClocks([said(1, HOUR + 0.5), (11.0, hello), said(500, HOUR + 12)])
    assert clocks.ours("n1", HOUR + 20) == pytest.approx(20.1)
    assert clocks.ours("n2", 20) == 20


def test_a_clock_that_is_set_has_two_offsets() -> None:
    before = [said(at, at + HOUR) for at in (10, 20, 60)]
    after = [said(at, at) for at in (70, 90)]
    clocks = HostClocks([*before, *after])
    assert clocks.ours("n1", HOUR + 30) == pytest.approx(30)
    assert clocks.ours("n1", 80) == pytest.approx(80)


def test_damaged_times_say_nothing() -> None:
    damaged = [said(1, float("nan")), said(2, float("inf")), (3.0, HostEvent("n1", 1, ["time"]))]
    assert HostClocks(damaged).ours("n1", 5) == 5
