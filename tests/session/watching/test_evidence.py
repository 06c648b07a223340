"""The times of a host's failures, by this machine's clock."""

from __future__ import annotations

from dtrain.messages.agent import Collectives, ErrorReport, Exited, Stack
from dtrain.session.watching.evidence import CLOCK_READINGS, MAX_PROCESSES, HostEvidence


def failed_at(host: HostEvidence, theirs: float, error: ErrorReport | None = None) -> float:
    event = Exited(time=theirs, role="worker", index=0, rank=0, pid=7, code=1, signal=None,
                   stopping=False, error=error, out_of_memory=False)  # fmt: skip
    (failure,) = host.failures(event)
    return failure.time


def test_the_shortest_travel_counts_and_late_events_do_not() -> None:
    host = HostEvidence("a", ())
    host.compare_clocks(1060.5, 1002.0)
    host.compare_clocks(1061.0, 1001.0, current=False)
    host.compare_clocks(1062.0, 9000.0, current=False)  # sent again after an outage
    assert failed_at(host, 1100.0) == 1040.0


def test_a_time_server_sets_the_clock_of_a_host() -> None:
    """Otherwise its failures would seem to be a minute older, and so the first cause."""
    host = HostEvidence("a", ())
    host.compare_clocks(1060.0, 1000.0)
    for number in range(CLOCK_READINGS):
        host.compare_clocks(1005.0 + number, 1005.5 + number)
    assert failed_at(host, 2000.0) == 2000.5


def test_a_failure_is_as_old_as_its_report() -> None:
    """A process may take seconds to exit, and those that fail because of it less."""
    host = HostEvidence("a", ())
    host.compare_clocks(1000.0, 1000.0)
    assert failed_at(host, 1003.0, ErrorReport(time=1000.5)) == 1000.5
    assert failed_at(host, 1003.0, ErrorReport()) == 1003.0


def test_a_host_cannot_invent_processes_without_limit() -> None:
    host = HostEvidence("a", ())
    for rank in range(MAX_PROCESSES + 5):
        host.add(Stack(time=0.0, role="worker", index=rank, rank=rank, text="first"))
        host.add(Collectives(time=0.0, rank=rank, groups=()))
    host.add(Stack(time=0.0, role="worker", index=0, rank=0, text="second"))
    assert len(host.stacks) == len(host.collectives) == MAX_PROCESSES
    assert host.stacks["0"] == "second"
