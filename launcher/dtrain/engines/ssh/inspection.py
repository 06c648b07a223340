"""Runs the quick checks of `dtrain check` on the connections of a launch.

Each link lends its connection and its thread to the inspection before it prepares the host. A host
gathers its facts as soon as it has connected. Once every host has gathered them or failed, the
hosts dial each other. Then all links continue, or none.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

from dtrain.checks import Finding, Severity
from dtrain.checks.judgement import before_launch
from dtrain.diagnostics import ConnectError
from dtrain.launchplan.plan import HostPlan, LaunchPlan
from dtrain.session.facts.gather_order import QUICK
from dtrain.session.facts.preflight import Preflight
from dtrain.transport.contract import Connection, RemoteProcess


class Inspection:
    """One check of an attempt's hosts. Methods may be called from any thread."""

    def __init__(
        self,
        plan: LaunchPlan,
        newcomers: Collection[str],
        *,
        base: Path,
        report: Callable[[Sequence[Finding]], None],
    ) -> None:
        """``newcomers`` are the hosts that no earlier attempt used. For other hosts, only errors
        are reported. ``report`` gets the findings once, if there are any."""
        self._newcomers = frozenset(newcomers)
        self._report = report
        self._connections: dict[str, Connection] = {}
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
        self._preflight = Preflight(
            plan,
            self._reach,
            base=base,
            run=lambda host, call: self._calls[host].put(call),
            stopped=self._over.is_set,
        )
        threading.Thread(target=self._check, name="dtrain-check", daemon=True).start()

    def check_host(self, host: str, connection: Connection) -> bool:
        """Lend a host's connection, and this thread until the check is over. True if the launch may
        continue."""
        self._connections[host] = connection
        self._serve(host)
        if self._bug is not None:
            raise self._bug
        return self._passed

    def drop(self, host: str) -> None:
        """The host has failed. Returns once the check is over."""
        if not self._over.is_set():
            self._serve(host)

    def _serve(self, host: str) -> None:
        """Run the host's part of the check until it is over. Without a connection, it fails."""
        for call in iter(self._calls[host].get, None):
            call()

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
        return frozenset(self._preflight.unanswered)

    @property
    def failing_newcomers(self) -> frozenset[str]:
        """Newcomers that would make the job fail."""
        return self._newcomers & {host for error in self.errors for host in error.hosts}

    def _reach(self, part: HostPlan) -> Connection:
        connection = self._connections.get(part.host.name)
        if connection is None:
            raise _DroppedError(part.host.name, "checking the host", "it is not connected")
        return connection

    def _run(self) -> None:
        try:
            evidence = self._preflight.look(QUICK)
            # The link of a host that did not connect reports it, and the launch ends.
            failures = [one for one in evidence.failures if not isinstance(one, _DroppedError)]
            dropped = len(failures) < len(evidence.failures)
            found = before_launch(replace(evidence, failures=tuple(failures)))
            self.errors = tuple(one for one in found if one.severity is Severity.ERROR)
            self._passed = not self.errors and not dropped
            if self._passed:
                self.relays = self._preflight.release()
        except KeyboardInterrupt:  # it was closed
            return
        finally:
            # Releases the ports that the check opened, before any link continues.
            self._preflight.close()
        shown = [one for one in found if self.errors or self._newcomers.intersection(one.hosts)]
        if shown:
            self._report(shown)


class _DroppedError(ConnectError):
    """The host has no connection."""
