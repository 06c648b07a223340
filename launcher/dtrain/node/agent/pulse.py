"""Checks whether the supervisor answers, and continues or kills it if it does not."""

from __future__ import annotations

import signal
import time

from dtrain.node.agent.processes import look, send
from dtrain.node.agent.worker_files import decode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dtrain.node.agent.processes import Proc

SILENCE = 15.0
"""Seconds without an answer after which the relay kills a supervisor that is to end the job. Its
loop answers at any time: work that takes seconds runs in other threads, see
`dtrain.node.agent.closing`."""


class Pulse:
    """The relay's view of the supervisor."""

    def __init__(self) -> None:
        self._proc: Proc | None = None
        self._asked: float | None = None  # when the first ping without an answer was sent
        self._end_by: float | None = None
        self._noticed: set[str] = set()
        self.notices: list[str] = []
        """Messages for the user."""
        self.pinged = False
        """Whether the launcher waits for the answer to a ping."""

    @property
    def pid(self) -> int | None:
        return self._proc.pid if self._proc is not None else None

    @property
    def silent(self) -> float:
        """Seconds since the oldest ping that the supervisor has not answered; 0 if there is
        none."""
        return time.monotonic() - self._asked if self._asked is not None else 0.0

    def watch(self, pid: int) -> None:
        self._proc = look(pid)

    def answered(self) -> None:
        self._asked = None

    def note(self, line: bytes) -> bool:
        """Note a command that goes to the supervisor. Returns whether it is a ping."""
        command = decode(line) or {}
        op = command.get("op")
        if op == "ping":
            self.pinged = True
            if self._asked is None:
                self._asked = time.monotonic()
        elif op in ("stop", "kill", "abort"):
            grace = command.get("grace") if op == "stop" else 0.0
            end_by = time.monotonic() + (grace if isinstance(grace, (int, float)) else 0.0)
            self._end_by = end_by if self._end_by is None else min(self._end_by, end_by)
        return bool(op == "ping")

    def rouse(self, *, heard: bool) -> None:
        """If the job is to end, continue a supervisor that is stopped, and kill one that does not
        answer. Only who has ``heard`` all its answers can tell: a relay may be unable to read them
        while it writes to a slow launcher."""
        proc = self._proc
        now = look(proc.pid) if self._end_by is not None and proc is not None else None
        if now is None or proc is None or now.start != proc.start:
            return
        if heard and time.monotonic() > (self._end_by or 0.0) and self.silent > SILENCE:
            self._end_by = None
            send(now, signal.SIGKILL)
            self._notice("the supervisor (process %d) did not answer: killed it" % now.pid)
        elif now.state == b"T":
            send(now, signal.SIGCONT)
            self._notice("the supervisor (process %d) was stopped: continued it" % now.pid)

    def _notice(self, text: str) -> None:
        """Add a message for the user, once."""
        if text not in self._noticed:
            self._noticed.add(text)
            self.notices.append(text)
