"""Finds out whether this machine has lost its own network, rather than the job its hosts.

Nothing shows the difference if no host of a running job can be reached. Then another host of the
cluster file is tried: a spare, or one whose part of the job has ended. If none answers either, the
launcher cannot know how the job goes on.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping

from dtrain.diagnostics import NodeError
from dtrain.engines.ssh import machine
from dtrain.engines.ssh.context import AttemptContext
from dtrain.engines.ssh.guarded import fault, run_guarded
from dtrain.engines.ssh.host_events import Post
from dtrain.engines.ssh.link import Link
from dtrain.launchplan.plan import HostPlan
from dtrain.session.facts.everywhere import everywhere
from dtrain.session.facts.gather_order import CONNECT_SECONDS
from dtrain.session.facts.host_connections import HostConnections

MOST_TRIED = 8
"""The most other hosts that are tried."""


class Isolation:
    """Only the thread of the attempt calls it."""

    def __init__(self, context: AttemptContext, links: Mapping[str, Link]) -> None:
        self._context = context
        self._links = links
        self._asked = False

    def look(self, running: Collection[str]) -> None:
        """Post `CutOff` soon if no host can be reached. ``running``: the hosts that may still run
        the job."""
        overdue = self._are_overdue(running)
        if overdue and not self._asked:
            run_guarded("other hosts", lambda: self._ask(running), self._fail)
        self._asked = overdue

    def _ask(self, running: Collection[str]) -> None:
        """Try the other hosts. An answer makes the next attempt of each link decide."""
        # The last spares are the least likely to have failed before.
        others = [
            HostPlan(host, 0, {}, (), "~")
            for host in reversed(self._context.all_hosts)
            if host.name not in running and host.transport == "ssh"
        ]
        connections = HostConnections(self._context.transport)
        answers = everywhere(connections, others[:MOST_TRIED], CONNECT_SECONDS)
        connections.close()
        if any(not isinstance(answer, NodeError) or answer.shows_contact for answer in answers):
            # Not `made`: it shows that the network has been there, and the hosts have not.
            self._context.contact.last = time.monotonic()
        elif self._are_overdue(running):
            self._context.posts.put(Post(machine.CutOff()))

    def _are_overdue(self, hosts: Collection[str]) -> bool:
        return all(self._links[host].overdue for host in hosts)

    def _fail(self, bug: Exception) -> None:
        error = fault(bug, self._context.folder.path)
        self._context.posts.put(Post(machine.LauncherFailed(), error))
