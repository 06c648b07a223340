"""Which failed connection attempts are worth another, and after how long. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable
from enum import Enum, unique

FIRST_PAUSE = 0.25
LONGEST_PAUSE = 4.0


@unique
class Transient(Enum):
    """Why an attempt failed that another may not; the value is how long to go on trying, in
    seconds since the first attempt."""

    THROTTLED = 60.0
    """sshd said that too many connections are being set up (MaxStartups)."""
    DROPPED = 20.0
    """The server closed the connection before its SSH handshake was over, as sshd does past
    MaxStartups, as a service restarting does, and as a firewall may."""
    SILENT = 25.0
    """Connected, but no SSH handshake came in time."""


class DroppedError(Exception):
    """An attempt that failed for a passing reason.

    ``excused`` is how many seconds of it a person took to answer; they count for nothing.
    """

    def __init__(self, kind: Transient, reason: str, *, excused: float = 0.0) -> None:
        super().__init__(reason)
        self.kind = kind
        self.reason = reason
        self.excused = excused


def pause(
    kind: Transient, attempt: int, elapsed: float, uniform: Callable[[float, float], float]
) -> float | None:
    """Seconds before attempt number ``attempt + 1``, or None to give up.

    ``attempt`` counts from 1, ``elapsed`` is seconds since the first one began, and ``uniform``
    draws from an interval. The pause is drawn from all of the interval that doubles with each
    attempt ("full jitter"): hosts that were dropped together must not come back together.
    """
    longest = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(attempt - 1, 16))
    seconds = uniform(0.0, longest)
    return seconds if elapsed + seconds < kind.value else None


def jitter(low: float, high: float) -> float:
    """The draw that launches use."""
    return random.uniform(low, high)  # noqa: S311 (no secret depends on it)
