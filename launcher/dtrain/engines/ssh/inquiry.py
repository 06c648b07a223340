"""Asks the hosts for the state of a run without a launcher."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import closing

from dtrain.diagnostics import NodeError, PrepareError
from dtrain.engines.ssh.relay_connection import start_relay
from dtrain.engines.ssh.requests import status_request
from dtrain.launchplan import names
from dtrain.launchplan.plan import HostPlan
from dtrain.messages import agent as messages
from dtrain.messages.decode import ProtocolError, answer_of
from dtrain.messages.sequence import MessageSequence
from dtrain.runs.record import Record
from dtrain.runs.shown_state import ShownState
from dtrain.runs.status import HostStatus, ProcessStatus
from dtrain.session.facts.everywhere import everywhere
from dtrain.session.facts.host_connections import HostConnections
from dtrain.session.relays.relay import RelayChannel
from dtrain.transport.contract import Transport

LIMIT = 10.0
"""Seconds that a host may take to answer."""
ATTEMPTED = "asking for the run's state"


def ask(
    record: Record, known: Mapping[str, HostStatus], transport: Transport
) -> dict[str, HostStatus]:
    """The state of every host of the current attempt. ``known`` has the last known states."""
    plan = record.plan

    def inquire(part: HostPlan) -> HostStatus:
        relay = start_relay(connections(part), plan, part, status_request(plan, part))
        return _answer(part, relay)

    with closing(HostConnections(transport)) as connections:
        answers = everywhere(inquire, plan.hosts, LIMIT)
    return {
        part.host.name: _silent(known.get(part.host.name), answer)
        if isinstance(answer, NodeError)
        else answer
        for part, answer in zip(plan.hosts, answers, strict=True)
    }


def _silent(before: HostStatus | None, error: NodeError) -> HostStatus:
    """Status of a host that did not answer. Keeps the time at which it became unreachable."""
    since = before.since if before is not None and before.state == ShownState.UNREACHABLE else None
    return HostStatus(ShownState.UNREACHABLE, since, error.reason)


def _answer(part: HostPlan, relay: RelayChannel) -> HostStatus:
    host = part.host.name
    behind = 0.0
    with answer_of(host, ATTEMPTED):
        for body in relay.messages():
            match messages.read_message(body):
                case messages.Hello(time=theirs):
                    behind = time.time() - theirs
                case messages.RunSeen() as seen:
                    return _status(seen, part, behind)
                case messages.Refused(reason=reason):
                    raise PrepareError(host, ATTEMPTED, reason)
                case other:
                    raise ProtocolError(f"{messages.name_of(other)}: unexpected answer")
    raise relay.failure()


def _status(seen: messages.RunSeen, part: HostPlan, behind: float) -> HostStatus:
    """The host's answer in this machine's time. The host's clock is ``behind`` seconds late."""
    sequence = MessageSequence(part, 0)
    for one in seen.processes:
        sequence.check_process(one)
    return HostStatus(
        state=seen.state,
        since=None if seen.since is None else seen.since + behind,
        detail=seen.why,
        processes=tuple(
            ProcessStatus(
                label=names.label(one.role, one.index, one.rank),
                pid=one.pid,
                started=one.started + behind,
                ended=None if one.ended is None else one.ended + behind,
                code=one.code,
                signal=one.signal,
            )
            for one in seen.processes
        ),
    )
