"""Requests to stop or leave a launch, from a signal handler or another thread."""

from __future__ import annotations

import queue
import threading
from enum import IntEnum
from typing import Protocol

from dtrain.node.waiting import next_item


class Force(IntEnum):
    """What a stop request does: the first, the second, and all later ones."""

    NONE = 0
    TERM = 1
    """TERM, and KILL after a while."""
    KILL = 2
    """KILL at once."""
    GIVE_UP = 3
    """Wait no longer for hosts that do not answer."""


class Controlled(Protocol):
    """Passes requests on to the hosts: the current attempt."""

    def interrupt(self, why: str, force: Force) -> None:
        """Called with the force that the requests have reached, possibly in a signal handler."""

    def detach(self) -> None: ...


class Control:
    """Stops a launch, or leaves it running. All methods are safe in any thread, in callbacks of
    the launch and in signal handlers.

    One control may serve several launches in sequence. After a stop request, later launches end
    before they start anything.
    """

    def __init__(self) -> None:
        self._asked = 0
        self._hung_up = False
        self._left = False
        self._why = ""
        self._attempt: Controlled | None = None
        self._passed_on = 0
        # Reentrant, because a signal handler may interrupt the thread that holds it.
        self._lock = threading.RLock()
        # Unlike an Event's, its lock can be taken in a signal handler.
        self._roused: queue.SimpleQueue[None] = queue.SimpleQueue()

    @property
    def interrupted(self) -> bool:
        """Whether anyone has requested a stop, or left."""
        return self._hung_up or self._left or self._asked > 0

    @property
    def force(self) -> Force:
        """What the requests so far ask for. `why` has their reason."""
        with self._lock:
            return Force(min(self._requests, Force.GIVE_UP))

    @property
    def left(self) -> bool:
        return self._left

    @property
    def why(self) -> str:
        """The reason in the first stop request."""
        return self._why

    def stop(self, why: str = "stopped", *, once: bool = False) -> None:
        """Stop the launch with the next `Force`: TERM, then KILL, then giving up.

        ``why`` becomes the report's reason. ``once``: do nothing if a stop was requested before.
        """
        with self._lock:
            if not (once and self.interrupted):
                self._asked += 1
                self._pass_on(why)

    def kill(self, why: str = "stopped") -> None:
        """Kill the workers at once. A second call gives up on hosts that do not answer."""
        with self._lock:
            self._asked = max(Force.KILL, self._asked + 1)
            self._pass_on(why)

    def hang_up(self, why: str) -> None:
        """The reader of the output is gone: stop the launch, unless a stop was requested before.

        Ctrl-C often closes a pipe too, and a closed terminal causes both a signal and an error.
        Neither is a second request of the user.
        """
        with self._lock:
            self._hung_up = True
            self._pass_on(why)

    def leave(self) -> None:
        """Stop watching. The job continues."""
        with self._lock:
            self._left = True
            self._roused.put(None)
            if self._attempt is not None:
                self._attempt.detach()

    def hand_to(self, attempt: Controlled) -> None:
        """Send requests to ``attempt`` from now on, including earlier ones."""
        with self._lock:
            self._attempt, self._passed_on = attempt, 0
            if self._left:
                attempt.detach()
            elif self.interrupted:
                self._pass_on(self._why)

    def wait(self, seconds: float) -> bool:
        """Whether anyone requests a stop within ``seconds``."""
        try:
            next_item(self._roused, seconds)
        except queue.Empty:
            return False
        return True

    def _pass_on(self, why: str) -> None:
        self._why = self._why or why
        self._roused.put(None)
        if self._attempt is not None and self._passed_on < self._requests:
            self._passed_on = self._requests
            self._attempt.interrupt(self._why, self.force)

    @property
    def _requests(self) -> int:
        return max(self._asked, self._hung_up)
