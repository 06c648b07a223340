"""What a run did, from its folder: the content of `dtrain report`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain

from dtrain.failures.cause import Report
from dtrain.failures.stalls import GOES_ON
from dtrain.failures.stragglers import Straggler
from dtrain.launchplan.plan import LaunchPlan
from dtrain.messages.agent import CodeFound, Revision, read_event
from dtrain.messages.decode import ProtocolError
from dtrain.messages.telemetry import Sample
from dtrain.records import dataclass
from dtrain.runs import events, telemetry
from dtrain.runs.attempt_events import Records
from dtrain.runs.clocks import HostClocks
from dtrain.runs.folder import RunFolder
from dtrain.runs.goodput import Goodput, goodput
from dtrain.runs.journal import JournalReader
from dtrain.runs.measured import (
    Difference,
    Measured,
    Point,
    differences,
    explanation,
    measured,
    points,
)
from dtrain.runs.observed import ObservedRun
from dtrain.runs.record import Record
from dtrain.runs.shown_state import BAD
from dtrain.runs.status import state_of
from dtrain.spec.model import Expected
from dtrain.wording import counted

SAMPLES, ALL_SAMPLES = 480, 1 << 14
"""Averages that are read of each host, evenly over the run, and of all hosts."""
EVENTS = 200
"""Events that are kept, half of them the first ones."""


@dataclass(frozen=True, slots=True)
class TimelineEntry:
    time: float
    """Seconds since the epoch."""
    text: str


@dataclass(frozen=True, slots=True)
class Summary:
    record: Record
    folder: str
    hosts: tuple[str, ...]
    """All hosts that it has used; empty before an engine has chosen them."""
    workers: int
    gpus: int
    code: Revision | None
    """The job's code: over SSH, at the start of the last attempt; else when the run was launched.
    None if Git does not know it."""
    began: float
    ended: float | None
    """None while it runs, or if its launcher is gone."""
    until: float
    """Its end, now, or the last event of a run without a launcher."""
    attended: bool
    """Whether it has ended, or a launcher is in charge of it."""
    state: str
    """See `state_of`."""
    goodput: Goodput
    curve: tuple[Point, ...]
    measured: Measured
    expected: Expected | None
    differences: tuple[Difference, ...]
    differs: str
    """Which part differs from the plan."""
    events: tuple[TimelineEntry, ...]
    slow: tuple[tuple[float, Straggler], ...]
    """The slow ranks, each time when they changed."""
    report: Report | None
    """How it ended, or how its last attempt failed if it goes on."""
    samples: dict[str, tuple[Sample, ...]]
    """Telemetry by host, thinned, without what ranks use; times are the launcher's."""
    unreadable: int
    """Lines of the journal that could not be read."""


def summary(folder: RunFolder, now: float) -> Summary:
    """``now`` is the end of a run that goes on, in seconds since the epoch.

    Raises UsageError if this version cannot read the run.
    """
    record = Record.load(folder.path)
    plan = record.plan
    reader = JournalReader(folder.journal)
    records = list(reader.read())
    attended = folder.in_charge() is not None
    records += reader.read()  # a launcher may have written the end meanwhile, and exited
    hosts = _hosts(records, plan)
    most = min(SAMPLES, max(1, ALL_SAMPLES // max(1, len(hosts))))
    clocks = HostClocks(records)
    samples = {
        host: tuple(
            replace(sample, time=clocks.ours(host, sample.time))
            for sample in telemetry.sampled(folder.path, host, most)
        )
        for host in hosts
    }
    used = [
        gpu.memory_used
        for of_host in samples.values()
        for sample in of_host
        for gpu in sample.gpus
        if gpu.memory_used is not None
    ]
    known = ObservedRun.of(records)
    attended = attended or known.report is not None
    hosts_now = known.attempt.hosts
    states = [hosts_now[one][1].state if one in hosts_now else "" for one in plan.host_names]
    until = known.until(now, attended=attended)
    spent = goodput(records, until)
    curve = points(records)
    found = measured(curve, spent, max(used) / 1024 if used else None)
    slow = tuple(
        (then, event.found)
        for then, event in records
        if isinstance(event, events.StragglersChanged) and event.found is not None
    )
    expected = plan.job.expected
    # The plan is for all hosts.
    compared = differences(expected, found, plan.devices) if expected and not record.dropped else []
    return Summary(
        record=record,
        folder=str(folder.path),
        hosts=hosts,
        workers=plan.world_size,
        gpus=plan.gpus,
        code=_code(records),
        began=records[0][0] if records else record.started,
        ended=known.ended,
        until=until,
        attended=attended,
        state=state_of(known.report, states, attended=attended),
        goodput=spent,
        curve=tuple(curve),
        measured=found,
        expected=expected,
        differences=tuple(compared),
        differs=explanation(
            found,
            compared,
            slow=bool(slow),
            compute_time=expected.compute_time if expected else None,
        ),
        events=tuple(_events(records)),
        slow=slow,
        report=known.report or known.failure,
        samples=samples,
        unreadable=reader.unreadable,
    )


def against_plan(folder: RunFolder, now: float) -> str:
    """What the run measured and what its plan expected, as one line; empty without both.

    Raises UsageError if this version cannot read the run.
    """
    run = summary(folder, now)
    parts = [
        f"{one.what} {one.measured:.3g} {one.unit}, planned {one.planned:.3g} {one.unit}"
        f" ({(one.ratio - 1) * 100:+.0f} %)"
        for one in run.differences
    ]
    return "; ".join(filter(None, [*parts, run.differs]))


def _hosts(records: Records, plan: LaunchPlan) -> tuple[str, ...]:
    """All hosts of all attempts."""
    seen = [event for _, event in records]
    found = [one.hosts for one in seen if isinstance(one, events.HostsAllocated)]
    if not found and plan.hosts_known:
        named = (events.RunStarted, events.NextAttempt)
        found = [one.hosts for one in seen if isinstance(one, named)] or [plan.host_names]
    return tuple(dict.fromkeys(chain.from_iterable(found)))


def _code(records: Records) -> Revision | None:
    found = None
    for _, event in records:
        match event:
            case events.CodeKnown(known):
                found = known
            case events.HostEvent(said={"event": CodeFound.kind} as said):
                with suppress(ProtocolError):  # a damaged journal
                    if isinstance(on_host := read_event(said), CodeFound):
                        found = on_host.revision
    return found


def _events(records: Sequence[tuple[float, events.JournalEvent]]) -> list[TimelineEntry]:
    found = [TimelineEntry(then, text) for then, event in records if (text := _text(event))]
    if len(found) <= EVENTS:
        return found
    half = EVENTS // 2
    left_out = f"… {len(found) - EVENTS} events left out"
    return [*found[:half], replace(found[half], text=left_out), *found[-half:]]


def _text(event: events.JournalEvent) -> str:
    match event:
        case events.NoticeShown(text) | events.TensorBoardAddress(text=text):
            return text
        case events.HostState(host, state, detail) if state in BAD:
            is_so = "failed" if state == "failed" else f"is {state}"
            return f"{host} {is_so}{f': {detail}' if detail else ''}"
        case events.NextAttempt(number, hosts):
            return f"attempt {number} begins on {counted(len(hosts), 'host')}"
        case events.LauncherAttached():
            return "another launcher takes charge of the run"
        case events.StragglersChanged(found):
            return str(found) if found is not None else ""
        case events.StallChanged(stall):
            return str(stall or GOES_ON)
    return ""
