"""The connection to one host and the relay on it, which a link replaces when they break."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dtrain.engines.ssh.requests import attach_request
from dtrain.launchplan.plan import HostPlan, LaunchPlan
from dtrain.node import protocol
from dtrain.node.agent.commands import Command, FirstCommand
from dtrain.session.relays.relay import CommandWriter, RelayChannel
from dtrain.transport import node_program
from dtrain.transport.contract import Connection, RemoteProcess, Transport


def start_relay(
    connection: Connection,
    plan: LaunchPlan,
    part: HostPlan,
    request: FirstCommand,
    started: RemoteProcess | None = None,
) -> RelayChannel:
    """Start an agent, unless the check has ``started`` one, and send its first command. Raises
    ConnectError."""
    name, python = "agent" if request["op"] == "launch" else "relay", plan.agent_python(part)
    process = started or node_program.start(connection, name, python, label=plan.run)
    process.write(protocol.encode_command(request))
    return RelayChannel(part.host.name, connection, process, python)


class RelayConnection:
    """Only the link's reader connects. Any thread may close what it has connected."""

    def __init__(
        self,
        transport: Transport,
        plan: LaunchPlan,
        part: HostPlan,
        commands: CommandWriter[Command],
    ) -> None:
        """``commands`` go to the current relay."""
        self.current: Connection | None = None
        self._transport = transport
        self._plan = plan
        self._part = part
        self._commands = commands

    def connect(self, wanted: Callable[[], bool]) -> Connection | None:
        """A new connection instead of the current one. None if it is not ``wanted`` any more.
        Raises NodeError."""
        connection = self._transport.connect(self._part.host)
        last, self.current = self.current, connection
        if last is not None:
            last.close()
        # Asked last: who wants no connection any more has closed only the one that was current.
        if wanted():
            return connection
        connection.close()
        return None

    def start(
        self, connection: Connection, request: FirstCommand, started: RemoteProcess | None = None
    ) -> RelayChannel:
        """As `start_relay`. The request precedes all of the writer's commands."""
        relay = start_relay(connection, self._plan, self._part, request, started)
        self._commands.relay = relay
        return relay

    def attach(
        self, wanted: Callable[[], bool], *, offsets: Mapping[str, int], outputs: bool
    ) -> RelayChannel | None:
        """A relay on a new connection, which replaces the current one, see `attach_request`. None
        if it is not ``wanted`` any more. Raises NodeError."""
        connection = self.connect(wanted)
        if connection is None:
            return None
        last = self._commands.relay
        request = attach_request(
            self._plan,
            self._part,
            offsets=offsets,
            outputs=outputs,
            previous=last.pid if last is not None else None,
        )
        return self.start(connection, request)

    def close(self) -> None:
        """Close the current connection, even if a thread is using it."""
        if self.current is not None:
            self.current.close()

    def disconnect(self, timeout: float) -> None:
        """`close`, once all commands are sent, or after ``timeout`` seconds."""
        self._commands.join(timeout)
        self.close()
