"""Runs the quick checks of `dtrain check` on the connections of a launch.

Each link lends its connection and its thread to the inspection before it prepares the host. Once
every host has connected or failed, the connected hosts are checked together. Then all links
continue, or none.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

from dtrain.checks import Finding, Severity, before_launch
from dtrain.launchplan.plan import LaunchPlan
from dtrain.session.gather_order import QUICK
from dtrain.session.preflight import Preflight
from dtrain.transport.contract import Connection, RemoteProcess


class Inspection:
    """One check of an attempt's hosts. Methods may be called from any thread."""

    def __init__(
        self,
        plan: LaunchPlan,
        newcomers: Collection[str],
        *,
        launch: str,
        base: Path,
        report: Callable[[Sequence[Finding]], None],
    ) -> None:
        """``launch`` is the attempt's name on hosts. ``newcomers`` are the hosts that no earlier
        attempt used. For other hosts, only errors are reported. ``report`` gets the findings once,
        if there are any."""
        self._plan = plan
        self._launch = launch
        self._newcomers = frozenset(newcomers)
        self._base = base
        self._report = report
        self._lock = threading.Lock()
        self._awaited = set(plan.host_names)
        self._connections: dict[str, Connection] = {}
        self._preflight: Preflight | None = None
        self._calls: dict[str, queue.SimpleQueue[Callable[[], None] | None]] = {
            host: queue.SimpleQueue() for host in plan.host_names
        }
        """What the thread of each host runs. None releases it."""
        self._over = threading.Event()
        self._passed = False
        self.relays: dict[str, RemoteProcess] = {}
        """The checks' processes by host, which are relays after a check that has passed. A host
        that has not answered has none."""
        self._bug: Exception | None = None
        self.errors: tuple[Finding, ...] = ()
        """Findings that would make the job fail."""

    def check_host(self, host: str, connection: Connection) -> bool:
        """Lend a host's connection, and this thread until the check is over. True if the launch may
        continue."""
        with self._lock:
            self._connections[host] = connection
        self.drop(host)
        for call in iter(self._calls[host].get, None):
            call()
        if self._bug is not None:
            raise self._bug
        return self._passed

    def drop(self, host: str) -> None:
        """Stop waiting for a host."""
        with self._lock:
            if host not in self._awaited:
                return
            self._awaited.remove(host)
            last = not self._awaited
        if last:
            threading.Thread(target=self._check, name="dtrain-check", daemon=True).start()

    def close(self) -> None:
        """Release all waiting links."""
        self._over.set()
        for calls in self._calls.values():
            calls.put(None)

    def _check(self) -> None:
        try:
            self._run()
        except Exception as error:  # noqa: BLE001 - a link reports it
            self._bug = error
        finally:
            self.close()

    @property
    def late(self) -> frozenset[str]:
        """The hosts that delay the check."""
        with self._lock:
            preflight = self._preflight
            return frozenset(self._awaited if preflight is None else preflight.unanswered)

    @property
    def failing_newcomers(self) -> frozenset[str]:
        """Newcomers that would make the job fail."""
        return self._newcomers & {host for error in self.errors for host in error.hosts}

    def _run(self) -> None:
        here = [part for part in self._plan.hosts if part.host.name in self._connections]
        preflight = Preflight(
            replace(self._plan, hosts=tuple(here)),
            lambda part: self._connections[part.host.name],
            base=self._base,
            run=lambda host, call: self._calls[host].put(call),
            launch=self._launch,
        )
        with self._lock:
            self._preflight = preflight
        try:
            found = before_launch(preflight.look(QUICK))
            if self._over.is_set():
                return
            self.errors = tuple(one for one in found if one.severity is Severity.ERROR)
            # The link of a host that did not connect reports it, and the launch ends.
            self._passed = not self.errors and len(here) == len(self._plan.hosts)
            if self._passed:
                self.relays = preflight.release()
        finally:
            # Releases the ports that the check opened, before any link continues.
            preflight.close()
        shown = [one for one in found if self.errors or self._newcomers.intersection(one.hosts)]
        if shown:
            self._report(shown)
