"""Reads a run's attempts so far from its folder, including those of earlier launchers."""

from __future__ import annotations

import time
from contextlib import suppress

from dtrain.launchplan.plan import LaunchPlan
from dtrain.messages.agent import Happened, read_event
from dtrain.messages.decode import ProtocolError
from dtrain.runs import events, restart
from dtrain.runs.folder import RunFolder
from dtrain.runs.journal import JournalReader


def past_attempts(folder: RunFolder, attempt: int) -> list[restart.AttemptResult]:
    """How the attempts before ``attempt`` ended."""
    found = {
        event.number: event.attempt
        for _, event in JournalReader(folder.journal).read()
        if isinstance(event, events.AttemptFailed)
    }
    return [found[number] for number in sorted(found) if number < attempt]


def latest_attempt(folder: RunFolder) -> int:
    """The number of the latest attempt in the journal."""
    records = JournalReader(folder.journal).read()
    begun = (event.attempt for _, event in records if isinstance(event, events.NextAttempt))
    return max(begun, default=1)


def notified(folder: RunFolder) -> set[events.Notified]:
    """The notifications that a launcher has sent, or was about to send."""
    records = JournalReader(folder.journal).read()
    return {event for _, event in records if isinstance(event, events.Notified)}


def began(folder: RunFolder) -> float:
    """When the latest attempt began, in seconds since the epoch."""
    times = [
        then
        for then, event in JournalReader(folder.journal).read()
        if isinstance(event, events.RunStarted | events.NextAttempt)
    ]
    return times[-1] if times else time.time()


def stop_reason(folder: RunFolder) -> str:
    """Why the latest attempt was stopped; empty if it was not."""
    why = ""
    for _, event in JournalReader(folder.journal).read():
        match event:
            case events.RunStarted() | events.NextAttempt():
                why = ""
            case events.StopRequested():
                why = event.why
    return why


def reported(folder: RunFolder) -> dict[str, list[tuple[float, Happened]]]:
    """What the hosts have reported of the latest attempt, by host, each with the time at which it
    arrived (seconds since the epoch)."""
    found: dict[str, list[tuple[float, Happened]]] = {}
    for arrived, event in JournalReader(folder.journal).read():
        match event:
            case events.NextAttempt():
                found.clear()
            case events.HostEvent(host, offset, said):
                with suppress(ProtocolError):
                    found.setdefault(host, []).append((arrived, Happened(offset, read_event(said))))
    return found


def received(folder: RunFolder, plan: LaunchPlan) -> dict[str, dict[str, int]]:
    """Offsets of every host's streams and events up to which data has arrived."""
    offsets: dict[str, dict[str, int]] = {part.host.name: {} for part in plan.hosts}
    for stream, size in folder.sizes(plan).items():
        if stream.host in offsets:
            offsets[stream.host][stream.path.name] = size
    for _, event in JournalReader(folder.journal).read():
        match event:
            case events.NextAttempt():
                for of_host in offsets.values():
                    of_host.pop("events", None)
            case events.HostEvent(host, offset) if host in offsets:
                offsets[host]["events"] = offset
    return offsets
