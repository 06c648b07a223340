"""Ends processes that an earlier attempt may have left on a host.

The host was unreachable when that attempt ended. It may take part in the next attempt, so its
cleanup reports only bugs and limits of this machine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from enum import Enum, auto

from dtrain.diagnostics import NodeError
from dtrain.engines.ssh.guarded import run_guarded
from dtrain.engines.ssh.outage import Delays
from dtrain.engines.ssh.relay_connection import RelayConnection
from dtrain.launchplan.plan import HostPlan, LaunchPlan
from dtrain.messages import agent as messages
from dtrain.messages.decode import ProtocolError
from dtrain.messages.sequence import MessageSequence
from dtrain.node.agent.commands import Command
from dtrain.runs.record import Record
from dtrain.session.relays.liveness import PingLimit
from dtrain.session.relays.relay import FLUSH_SECONDS, CommandWriter, RelayChannel, close_all
from dtrain.transport.contract import Transport
from dtrain.transport.retry import spread


class _Progress(Enum):
    """Progress of the cleanup of a host."""

    PENDING = auto()
    CLEAN = auto()
    """No process of the attempt is left there."""
    FAILED = auto()
    """The host answered, but it still runs processes or broke the protocol."""


class _CleanupLink:
    """Tries to reach a host until `close`, only to kill its processes of one attempt."""

    def __init__(
        self,
        transport: Transport,
        plan: LaunchPlan,
        part: HostPlan,
        report: Callable[[Exception], None],
    ) -> None:
        """For ``report`` see `Cleanups.start`."""
        self.host = part.host.name
        self.attempt = plan.attempt
        self.state = _Progress.PENDING
        self.problem: NodeError | None = None
        """Why the host could not be reached the last time."""
        self._report = report
        self._sequence = MessageSequence(part, plan.world_size)
        self._closed = threading.Event()
        self._commands = CommandWriter[Command](lambda: PingLimit.STOPPING, self._fail)
        self._connection = RelayConnection(transport, plan, part, self._commands)

    def start(self) -> None:
        self._commands.start()
        run_guarded(f"{self.host} cleanup", self._read, self._fail)

    def close(self) -> None:
        self._closed.set()
        self._commands.finish()

    def disconnect(self, timeout: float) -> None:
        self._connection.disconnect(timeout)

    def _read(self) -> None:
        delays = Delays()
        while not self._closed.is_set() and self.state is _Progress.PENDING:
            try:
                relay = self._connection.attach(
                    lambda: not self._closed.is_set(), offsets={}, outputs=False
                )
                if relay is None:
                    return
                self._follow(relay)
            except NodeError as error:
                self.problem = error  # retry until the host answers
            except ProtocolError:
                self._commands.send({"op": "kill"})
                self.state = _Progress.FAILED
            self._closed.wait(spread(delays.next(self.problem)))
        # The run may go on for days, and so would the connection.
        self.close()
        self.disconnect(FLUSH_SECONDS)

    def _fail(self, bug: Exception) -> None:
        self.state = _Progress.FAILED
        self._report(bug)

    def _follow(self, relay: RelayChannel) -> None:
        self._sequence.begin_relay()
        for body in relay.messages():
            self._take(relay, messages.read_message(body))
            if self.state is not _Progress.PENDING:
                return

    def _take(self, relay: RelayChannel, message: messages.AgentMessage) -> None:
        self._sequence.check_message(message, started=True)
        match message:
            case messages.Hello(pid=pid):
                relay.pid = pid
            case messages.Attached():
                self._commands.send({"op": "kill"})
            case (
                messages.Happened(event=messages.Ended(survivors=()))
                | messages.Lost(survivors=())
                | messages.Refused(what="gone")
            ):
                self.state = _Progress.CLEAN
            # An end with survivors may be long ago: then `lost` follows.
            case messages.Lost() | messages.Bye():
                self.state = _Progress.FAILED
            case messages.StreamFound() | messages.RunSeen():
                raise ProtocolError(f"{messages.name_of(message)}: not requested")


class Cleanups:
    """The cleanup links of one run."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._links: list[_CleanupLink] = []

    def start(
        self,
        record: Record,
        uncleaned: Iterable[tuple[str, int]],
        report: Callable[[Exception], None],
    ) -> None:
        """End leftover processes. ``uncleaned`` has pairs of a host and an attempt's number.
        ``report`` gets what only a bug, or a limit of this machine, raises."""
        cluster = record.request.spec().cluster
        hosts = {host.name: host for host in cluster.hosts + cluster.spares}
        for name, number in uncleaned:
            plan = replace(record, attempt=number).plan
            link = _CleanupLink(
                self._transport, plan, HostPlan(hosts[name], 0, {}, (), "~"), report
            )
            link.start()
            self._links.append(link)

    @property
    def pending(self) -> list[str]:
        """Hosts that have not answered yet."""
        return [link.host for link in self._links if link.state is _Progress.PENDING]

    @property
    def problems(self) -> list[NodeError]:
        """Why those hosts cannot be reached, as far as it is known."""
        pending = (link for link in self._links if link.state is _Progress.PENDING)
        return [link.problem for link in pending if link.problem is not None]

    @property
    def clean(self) -> set[tuple[str, int]]:
        """Hosts without leftover processes, each with the attempt's number."""
        return {(one.host, one.attempt) for one in self._links if one.state is _Progress.CLEAN}

    def close(self) -> None:
        close_all(self._links)
