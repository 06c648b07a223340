"""Detects a relay or a supervisor that does not answer. Pure."""

from __future__ import annotations

from enum import IntEnum

from dtrain.diagnostics import ConnectError

SUPERVISOR_SILENCE = 15.0
"""Seconds without an answer after which the supervisor may be stopped (SIGSTOP)."""


class PingLimit(IntEnum):
    """How many pings a relay may leave unanswered."""

    NORMAL = 4
    BEFORE_HELLO = 12
    """The relay has not sent its first message: a slow host may still be starting Python."""
    STOPPING = 2
    """The job is about to stop: a new relay must still report that before the host is given up, see
    `dtrain.engines.ssh.machine.CLEANING`."""


class RelayLiveness:
    """One relay and its unanswered pings.

    A ping counts only while the reader waits for the relay: a busy reader would not see the answer.
    """

    def __init__(self) -> None:
        self.given_up = False
        """Whether the relay must be replaced. Stays true, even if the relay sends data later."""
        self._waiting = False
        self._unanswered = 0

    @property
    def quiet(self) -> bool:
        """Whether nothing has arrived since the ping before the last one."""
        return self._waiting and self._unanswered > 1

    def wait(self) -> None:
        """The reader starts to wait for the relay."""
        self._waiting, self._unanswered = True, 0

    def hear(self) -> None:
        """The reader stops waiting: data arrived, or the connection ended."""
        self._waiting = False

    def ping(self, patience: int | None) -> bool:
        """Count a ping. True if the relay has now left more than ``patience`` unanswered and is
        given up. ``None`` never gives up."""
        if not self._waiting or self.given_up:
            return False
        self._unanswered += 1
        self.given_up = patience is not None and self._unanswered > patience
        return self.given_up


class SupervisorLiveness:
    """Tracks whether the supervisor answers its relay."""

    def __init__(self, host: str, timeout: float) -> None:
        """``timeout``: seconds without an answer after which the host is lost."""
        self._host = host
        self._timeout = timeout
        self._silent = False

    def hear(self, pid: int, silent: float) -> tuple[str, ConnectError | None]:
        """``silent``: seconds for which process ``pid`` has not answered. Returns a notice for the
        user (or ``""``), and an error once the host is lost."""
        name = f"the supervisor (process {pid}) on {self._host}"
        hint = f"continue it there: kill -CONT {pid}"
        notice = ""
        now_silent = silent >= SUPERVISOR_SILENCE
        if now_silent and not self._silent:
            notice = f"{name} does not answer; it may be stopped (SIGSTOP)\nhint: {hint}"
        elif self._silent and not now_silent:
            notice = f"{name} answers again"
        self._silent = now_silent
        if not now_silent or silent <= self._timeout:
            return notice, None
        reason = f"its supervisor (process {pid}) has not answered for {silent:.0f} s"
        return notice, ConnectError(self._host, "following the job", reason, hint=hint)
