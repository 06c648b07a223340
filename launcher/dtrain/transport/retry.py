"""Decides which failed connection attempts to retry, and when. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable
from enum import Enum, unique

FIRST_PAUSE = 0.25
LONGEST_PAUSE = 4.0


@unique
class Transient(Enum):
    """Why an attempt failed, for reasons that may pass. The value is the time during which to
    retry, in seconds since the first attempt."""

    THROTTLED = 60.0
    """sshd reported too many unauthenticated connections (MaxStartups), or that it serves this
    address later (PerSourcePenalties, since OpenSSH 9.8: by default up to 10 minutes)."""
    DROPPED = 20.0
    """The server closed the connection during the SSH handshake. sshd does this past MaxStartups
    and while it restarts; a firewall may do it too."""
    SILENT = 25.0
    """Connected, but the SSH handshake did not finish in time."""


class DroppedError(Exception):
    """An attempt that failed for a temporary reason.

    ``excused`` is the time that the user took to answer questions, in seconds. It does not count
    as elapsed time. ``said``: whether the reason contains words of the server.
    """

    def __init__(
        self, kind: Transient, reason: str, *, excused: float = 0.0, said: bool = False
    ) -> None:
        super().__init__(reason)
        self.kind = kind
        self.reason = reason
        self.excused = excused
        self.said = said


def pause(
    kind: Transient, attempt: int, elapsed: float, uniform: Callable[[float, float], float]
) -> float | None:
    """Seconds before attempt number ``attempt + 1``, or None to give up.

    ``attempt`` counts from 1, ``elapsed`` is in seconds since the start of the first attempt, and
    ``uniform`` draws from an interval. The interval doubles with each attempt, and the pause is
    drawn from all of it ("full jitter"), so that hosts dropped together do not retry together.
    """
    longest = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(attempt - 1, 16))
    seconds = uniform(0.0, longest)
    return seconds if elapsed + seconds < kind.value else None


def spread(seconds: float) -> float:
    """A part of ``seconds``, at least half, so that many hosts do not retry at the same moment."""
    return seconds * random.uniform(0.5, 1.0)  # noqa: S311 (no secret depends on it)
