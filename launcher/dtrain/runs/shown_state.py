"""The state of a host as people and programs see it."""

from __future__ import annotations

from enum import Enum


class ShownState(str, Enum):
    """In the order in which a host passes through them."""

    __str__ = str.__str__

    QUEUED = "queued"
    """Waits for an engine to allocate it."""
    CONNECTING = "connecting"
    ATTACHING = "attaching"
    CHECKING = "checking"
    SYNCING = "syncing"
    PREPARING = "preparing"
    READY = "ready"
    RUNNING = "running"
    STOPPING = "stopping"
    ENDED = "ended"
    """No process of the run is left."""
    FAILED = "failed"
    """It could not start."""
    UNREACHABLE = "unreachable"
    """It may come back, until the run ends."""
    LOST = "lost"
    """Connected, but it did not report how the job ended."""


FINAL = (ShownState.ENDED, ShownState.FAILED, ShownState.UNREACHABLE, ShownState.LOST)
"""What a host may be at the end of a run."""
BAD = (ShownState.UNREACHABLE, ShownState.LOST, ShownState.FAILED)
