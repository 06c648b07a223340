"""Tracks how long a host is unreachable before it is lost. Pure: time is an argument."""

from __future__ import annotations

import math

from dtrain.diagnostics import AuthError, NodeError
from dtrain.engines.backoff import Backoff

STABLE = 5.0
"""Seconds for which a relay must follow the job and answer until the outage is over. New data from
the job ends the outage at once."""
DELAY, DELAY_MOST = 0.25, 5.0
REFUSED_DELAY, REFUSED_DELAY_MOST = 10.0, 60.0
"""After a refused login: each may ask the user, and many of them get this address banned."""
NO_CONTACT = 2 * REFUSED_DELAY_MOST
"""The least seconds without contact after which the launcher's own network may have been gone. A
relay answers every few seconds, but a host that refuses logins is heard only at each login."""


class Delays:
    """Pauses between attempts to connect to a host; longer each time."""

    def __init__(self) -> None:
        self._usual = Backoff(DELAY, DELAY_MOST)
        self._refused = Backoff(REFUSED_DELAY, REFUSED_DELAY_MOST)

    def next(self, problem: NodeError | None) -> float:
        """Seconds to wait before the next attempt. ``problem``: why the last one failed."""
        return (self._refused if isinstance(problem, AuthError) else self._usual).next()

    def reset(self) -> None:
        self._usual.reset()
        self._refused.reset()


class Contact:
    """When the launcher reached any host of an attempt. All links share it."""

    def __init__(self, last: float = -math.inf) -> None:
        self.last = last
        self.regained = -math.inf
        """When a host was reached after none had been for so long that all would be lost."""

    def made(self, now: float, limit: float) -> None:
        if now - self.last >= max(limit, NO_CONTACT):
            self.regained = now
        self.last = now


class Outage:
    """The state of one host's connection.

    The host is lost once an attempt has failed that began after the time limit. Time alone does not
    count: while the launcher stood still (Ctrl-Z), the host may have come back. If the launcher has
    reached no host since the limit, its own network may be gone, and the host is not lost. Once it
    reaches one, the time until then does not count: its network may soon be gone again.

    A relay that connects and soon breaks or falls silent does not end an outage. Otherwise such a
    relay could keep the job waiting forever.
    """

    def __init__(self, contact: Contact | None = None) -> None:
        """``contact``: None if it does not matter whose network is gone."""
        self._contact = contact or Contact(math.inf)
        self.reachable = True
        """Whether a relay follows the job."""
        self._since = math.inf
        self._attempted_at = 0.0
        self._attached_at: float | None = None
        self.delays = Delays()

    def begin(self, now: float) -> None:
        """The connection broke or does not exist yet."""
        if self._since == math.inf:
            self._since = self._attempted_at = now
        self._attached_at = None
        self.reachable = False

    def attempt(self, now: float) -> None:
        """An attempt to connect begins."""
        self._attempted_at = now

    def attached(self, now: float) -> None:
        """A new relay follows the job."""
        self._attached_at = now
        self.reachable = True

    def answered(self, now: float) -> None:
        """The relay sent something."""
        if self._attached_at is not None and now - self._attached_at >= STABLE:
            self.progressed()

    def progressed(self) -> None:
        """The host sent new output or a new event."""
        self._since = math.inf
        self.delays.reset()

    @property
    def attempted(self) -> float:
        """How many seconds of the outage count, until the last attempt began. Less than 0 without
        an outage."""
        return self._attempted_at - max(self._since, self._contact.regained)

    def is_over(self, limit: float, *, decided: bool = False) -> bool:
        """Whether the host is lost if the last attempt has failed. Once the outcome of the job is
        ``decided``, it does not matter whose network is gone."""
        contact = Contact(math.inf) if decided else self._contact
        until = min(self._attempted_at, contact.last)
        return until - max(self._since, contact.regained) >= limit
