"""The quick part of `dtrain check`, on the connections of a launch.

Each link brings its connection here before it prepares anything, and waits. Once all hosts have
come, or cannot, those that have are looked at together; then either all links go on or none does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

from dtrain.checks import Finding, Severity, before_launch
from dtrain.launchplan.plan import HostPlan, LaunchPlan
from dtrain.session.preflight import QUICK, Preflight
from dtrain.transport.contract import Connection


class Inspection:
    """One look at the hosts of an attempt. Methods may be called from any thread."""

    def __init__(
        self,
        plan: LaunchPlan,
        newcomers: Collection[str],
        *,
        base: Path,
        tell: Callable[[Sequence[Finding]], None],
    ) -> None:
        """``newcomers`` are the hosts that no attempt before has used: of the others, only what
        would make the job fail is told. ``tell`` gets findings, if there are any, once."""
        self._plan = plan
        self._newcomers = frozenset(newcomers)
        self._base = base
        self._tell = tell
        self._lock = threading.Lock()
        self._awaited = {part.host.name for part in plan.hosts}
        self._connections: dict[str, Connection] = {}
        self._preflight: Preflight | None = None
        self._over = threading.Event()
        self._may_go_on = False
        self.errors: tuple[Finding, ...] = ()
        """What would make the job fail."""

    def arrive(self, host: str, connection: Connection) -> bool:
        """Lend a host's connection until all hosts have been looked at; whether the launch may go
        on there."""
        with self._lock:
            self._connections[host] = connection
        self.leave_out(host)
        self._over.wait()
        return self._may_go_on

    def leave_out(self, host: str) -> None:
        """Wait no longer for a host."""
        with self._lock:
            if host not in self._awaited:
                return
            self._awaited.remove(host)
            last = not self._awaited
        if last:
            try:
                self._look()
            finally:
                self._over.set()

    def close(self) -> None:
        """Let everybody go who still waits."""
        self._over.set()

    @property
    def late(self) -> frozenset[str]:
        """The hosts that keep the others waiting."""
        with self._lock:
            preflight = self._preflight
            return frozenset(self._awaited if preflight is None else preflight.unanswered)

    @property
    def blamed(self) -> frozenset[str]:
        """Newcomers with which the job would fail."""
        return self._newcomers & {host for error in self.errors for host in error.hosts}

    def _look(self) -> None:
        here = [part for part in self._plan.hosts if part.host.name in self._connections]
        preflight = Preflight(replace(self._plan, hosts=tuple(here)), self._lend, base=self._base)
        with self._lock:
            self._preflight = preflight
        try:
            found = before_launch(preflight.look(QUICK))
        finally:
            # The ports that were tried are free again before anybody goes on.
            preflight.close()
        if self._over.is_set():
            return
        self.errors = tuple(one for one in found if one.severity is Severity.ERROR)
        # A host that has not come is told of by its link, and the launch is given up.
        self._may_go_on = not self.errors and len(here) == len(self._plan.hosts)
        told = [one for one in found if self.errors or self._newcomers.intersection(one.hosts)]
        if told:
            self._tell(told)

    def _lend(self, part: HostPlan) -> Connection:
        return self._connections[part.host.name]
