"""Where the wall time of a run went, from its journal. Pure.

Each moment of a run belongs to one class, so the classes add up to the wall time:

    start     until the first step of an attempt is done
    data      waiting for data
    steps     steps that count
    save      saving checkpoints
    load      loading checkpoints
    lost      steps after the checkpoint from which a later attempt continued
    waiting   for a queue, for an unreachable host, or for the next attempt
    hung      no step, until the job went on or was stopped
    other     after the last step, or without reports of steps

Goodput is the share of ``steps`` (Google's ml-goodput-measurement counts the same losses). Reports
carry the clock of their host, see `dtrain.runs.clocks`. Losses of an attempt are known once a later
attempt has done a step: its first step follows the checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import field

from dtrain.records import dataclass
from dtrain.runs.attempt_events import AttemptEvents, ProgressPoint, Records, attempts_in

DELAY = 1.0
"""Seconds within which a report reaches the launcher, which sees a hang from then on."""
CLASSES = ("start", "data", "steps", "save", "load", "lost", "waiting", "hung", "other")


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a run; times in seconds since the epoch."""

    begin: float
    end: float
    what: str
    """One of `CLASSES`."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds of it in phases, which count as these and not as ``what``."""

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by class."""
        left = self.end - self.begin
        found = {}
        for name, spent in self.phases.items():
            found[name] = min(max(0.0, spent), left)
            left -= found[name]
        found[self.what] = found.get(self.what, 0.0) + left
        return found


@dataclass(frozen=True, slots=True)
class AttemptTime:
    """One attempt; times in seconds since the epoch."""

    number: int
    begin: float
    over: float
    """When it was done or had failed, or now. Until ``end``, the run waited for the next one."""
    end: float
    why: str
    """Why it ended; empty if it runs."""
    ok: bool | None
    """Whether the job was done; None while it runs."""
    first_step: int | None
    last_step: int | None
    segments: tuple[Segment, ...]
    """In order, without gaps."""


@dataclass(frozen=True, slots=True)
class Goodput:
    wall: float
    """Seconds from the start of the run to its end, or until now."""
    seconds: Mapping[str, float]
    """By each of `CLASSES`; they add up to ``wall``."""
    attempts: tuple[AttemptTime, ...]

    @property
    def share(self) -> float | None:
        """The goodput, from 0 to 1. None if the job reported no steps."""
        if self.wall <= 0 or all(one.first_step is None for one in self.attempts):
            return None
        return self.seconds["steps"] / self.wall


def goodput(records: Records, now: float) -> Goodput:
    """Where each moment of a run went, until ``now`` (seconds since the epoch) if the journal
    has no end."""
    attempts = attempts_in(records, now)
    reports = any(one.points for one in attempts)
    resumed = math.inf
    found: list[AttemptTime] = []
    for one in reversed(attempts):
        timed = _timed(one, resumed, reports)
        found.append(timed)
        if timed.first_step is not None:
            # Steps after this one were done again.
            resumed = min(resumed, max(0, timed.first_step - 1))
    found.reverse()
    seconds = dict.fromkeys(CLASSES, 0.0)
    for attempt in found:
        for segment in attempt.segments:
            for name, spent in segment.seconds.items():
                seconds[name] += spent
    wall = found[-1].end - found[0].begin if found else 0.0
    return Goodput(wall, seconds, tuple(found))


def _timed(one: AttemptEvents, resumed: float, reports: bool) -> AttemptTime:
    """``resumed``: the step after which a later attempt did the steps again. ``reports``: whether
    the job reports its steps."""
    end = min(one.end, one.failed)
    points = _ordered(one, end)
    steps = [step for _, step, _ in points]
    last = points[-1][0] if points else one.begin
    running = max(one.started.values(), default=math.inf)
    working = max(last, min(one.stopped if points or reports else running, end))
    if points and one.ok:
        working = last
    apart = max(last, min(one.apart.values(), default=math.inf))
    if points and apart < working:
        one.waits.append((apart, end))
    segments = _segments(one.begin, points)
    before = segments[-1].end if segments else one.begin
    segments.append(Segment(before, working, "steps" if points else "start"))
    segments.append(Segment(working, end, "other"))
    if end < one.end:
        segments.append(Segment(end, one.end, "waiting"))
    lost = _lost_since(points, resumed)
    if lost is not None:
        segments = _painted(segments, (lost, working), "lost")
    for part in one.waits:
        segments = _painted(segments, part, "waiting")
    for seen, until in one.hung:
        begin = max((at for at, _, _ in points if seen - DELAY < at < seen), default=seen)
        segments = _painted(segments, (max(begin, one.begin), until), "hung")
    return AttemptTime(
        one.number,
        one.begin,
        end,
        one.end,
        one.why,
        one.ok,
        steps[0] if steps else None,
        max(steps) if steps else None,
        tuple(part for part in segments if part.end > part.begin),
    )


def _segments(begin: float, points: Sequence[ProgressPoint]) -> list[Segment]:
    """The attempt until its last report of phases: its start, and then its steps."""
    if not points:
        return []
    first = points[0][0]
    segments = [Segment(begin, first, "start")]
    known: Mapping[str, float] = {}
    for at, _, phases in points:
        if phases is None:
            continue
        spent = {name: value - known.get(name, 0.0) for name, value in phases.items()}
        before = segments[-1].end
        if not known and len(segments) == 1:
            # It covers the start, too. A checkpoint is loaded before the first step.
            part = (first - begin) / (at - begin) if at > begin else 1.0
            early = {name: n if name == "load" else n * part for name, n in spent.items()}
            segments[0] = Segment(begin, first, "start", early)
            spent = {name: n - early[name] for name, n in spent.items()}
        segments.append(Segment(before, at, "steps", spent))
        known = phases
    return segments


def _ordered(one: AttemptEvents, end: float) -> list[ProgressPoint]:
    """The reports after the first step, on the launcher's clock, within the attempt."""
    return [
        (min(max(at, one.begin), end), step, phases)
        for at, step, phases in sorted(one.points, key=lambda point: point[:2])
        if step > 0
    ]


def _lost_since(points: Sequence[ProgressPoint], resumed: float) -> float | None:
    """When the job had done step ``resumed``; None if all its steps count."""
    kept = [(at, step) for at, step, _ in points if step <= resumed]
    after = next(((at, step) for at, step, _ in points if step > resumed), None)
    if after is None:
        # Steps since the last report may be lost, too, but nobody knows.
        return None
    if not kept:
        return points[0][0]
    (at, step), (then, done) = kept[-1], after
    return at + max(0.0, then - at) * (resumed - step) / (done - step)


def _painted(segments: Sequence[Segment], window: tuple[float, float], what: str) -> list[Segment]:
    """The segments with everything in ``window`` as ``what``."""
    found: list[Segment] = []
    for part in segments:
        begin, end = max(part.begin, window[0]), min(part.end, window[1])
        if begin >= end:
            found.append(part)
            continue
        outside = [Segment(part.begin, begin, part.what), Segment(end, part.end, part.what)]
        # Phases of a cut part count in its longer rest.
        longest = max(outside, key=lambda one: one.end - one.begin)
        for one in (outside[0], Segment(begin, end, what), outside[1]):
            if one is longest:
                one = Segment(one.begin, one.end, one.what, part.phases)
            found.append(one)
    return [one for one in found if one.end > one.begin]
