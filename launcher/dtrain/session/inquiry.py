"""How a run that nobody is in charge of stands, asked of its hosts."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from dtrain import protocol
from dtrain.diagnostics import ConnectError, NodeError, PrepareError
from dtrain.launchplan import HostPlan
from dtrain.record import Record
from dtrain.session import agent
from dtrain.session.preflight import everywhere
from dtrain.session.status import HostStatus, ProcessStatus
from dtrain.transport.contract import RemoteProcess, Transport

LIMIT = 10.0
"""Seconds that a host has for its answer."""
ATTEMPTED = "asking how the run stands"


def ask(
    record: Record, known: Mapping[str, HostStatus], transport: Transport
) -> dict[str, HostStatus]:
    """How every host of the run's present attempt stands. ``known`` is what was known before."""
    plan = record.plan()

    def inquire(part: HostPlan) -> HostStatus:
        command = {
            "op": "look",
            "protocol": protocol.VERSION,
            "run": record.on_hosts,
            "host": part.host.name,
            "run_dir": plan.run_dir,
            "trust_group": plan.trust_group,
        }
        connection = transport.connect(part.host)
        try:
            python = plan.agent_python(part)
            return _answer(
                part.host.name, agent.start(connection, python, record.on_hosts, command)
            )
        finally:
            connection.close()

    answers = everywhere(inquire, plan.hosts, LIMIT)
    return {
        part.host.name: _silent(known.get(part.host.name), answer)
        if isinstance(answer, NodeError)
        else answer
        for part, answer in zip(plan.hosts, answers, strict=True)
    }


def _silent(before: HostStatus | None, error: NodeError) -> HostStatus:
    """A host that did not answer; since when, if somebody had noticed before."""
    since = before.since if before is not None and before.state == "unreachable" else None
    return HostStatus("unreachable", since, error.reason)


def _answer(host: str, process: RemoteProcess) -> HostStatus:
    decoder = protocol.FrameDecoder()
    behind = 0.0
    try:
        while data := process.read():
            for frame in decoder.feed(data):
                body = frame.body if isinstance(frame, protocol.Message) else {}
                match body.get("type"):
                    case "hello":
                        behind = time.time() - body["time"]
                    case "status":
                        return _status(body, behind)
                    case "refused":
                        raise PrepareError(host, ATTEMPTED, str(body["reason"]))
    except (protocol.ProtocolError, LookupError, ArithmeticError, TypeError, ValueError) as error:
        raise ConnectError(host, ATTEMPTED, f"an unreadable answer ({error})") from None
    said = (process.stderr() + b"\n" + decoder.noise).decode(errors="replace").strip()
    last = said.splitlines()[-1] if said else "it ended without an answer"
    raise ConnectError(host, ATTEMPTED, f"the agent cannot run there: {last}")


def _status(body: dict[str, Any], behind: float) -> HostStatus:
    """What a host says, by this machine's clock, which the host's is ``behind`` so many seconds."""

    def ours(then: float | None) -> float | None:
        return None if then is None else float(then) + behind

    return HostStatus(
        state=str(body["state"]),
        since=ours(body["since"]),
        detail=str(body["why"]),
        processes=tuple(
            ProcessStatus(
                label=str(one["rank"])
                if one["rank"] is not None
                else f"{one['role']}{one['index']}",
                pid=int(one["pid"]),
                started=float(one["started"]) + behind,
                ended=ours(one["ended"]),
                code=one["code"],
                signal=one["signal"],
            )
            for one in body["processes"]
        ),
    )
