"""What the hosts of the latest attempt have sent, for a launcher that takes over the run."""

from __future__ import annotations

from contextlib import suppress

from dtrain.launchplan.plan import LaunchPlan
from dtrain.messages.agent import Happened, read_event
from dtrain.messages.decode import ProtocolError
from dtrain.runs.folder import RunFolder
from dtrain.runs.observed import ObservedAttempt


def reported(attempt: ObservedAttempt) -> dict[str, list[tuple[float, Happened]]]:
    """The events of each host, with the times at which they arrived (seconds since the epoch)."""
    found: dict[str, list[tuple[float, Happened]]] = {}
    for arrived, event in attempt.reported:
        with suppress(ProtocolError):
            happened = Happened(event.offset, read_event(event.said))
            found.setdefault(event.host, []).append((arrived, happened))
    return found


def received(
    attempt: ObservedAttempt, folder: RunFolder, plan: LaunchPlan
) -> dict[str, dict[str, int]]:
    """Offsets of the hosts' streams and events up to which data has arrived."""
    offsets = folder.offsets(plan)
    for _, event in attempt.reported:
        offsets.setdefault(event.host, {})["events"] = event.offset
    return offsets
