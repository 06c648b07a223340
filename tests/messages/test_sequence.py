"""Impossible and repeated events."""

from __future__ import annotations

from typing import Any

import pytest

from dtrain.launchplan.build import build
from dtrain.messages.agent import Happened, StreamFound, read_message
from dtrain.messages.decode import ProtocolError
from dtrain.messages.sequence import MessageSequence
from dtrain.spec.load import parse

DIRECT = "cluster: {hosts: [a, b], gpus: 2}\njob: {framework: torch, script: t.py}"
TORCHRUN = DIRECT.replace("t.py", "t.py, rendezvous: {backend: static}")


def sequence(file: str = DIRECT) -> MessageSequence:
    plan = build(parse(file, "cluster.yaml"))
    return MessageSequence(plan.hosts[1], plan.world_size)


def happened(offset: int, kind: str, role: str = "worker", index: int = 2, **odd: Any) -> Happened:
    rank = index if role == "worker" else None
    event = {"event": kind, "time": 1.0, "role": role, "index": index, "rank": rank, "pid": 7}
    event |= {"code": 0, "signal": None, "stopping": False, "survivors": [], "reason": ""}
    event |= {"text": "", "groups": []}
    message = read_message({"type": "event", "offset": offset, "event": {**event, **odd}})
    assert isinstance(message, Happened)
    return message


def test_all_events_of_an_attempt_and_their_repetition() -> None:
    order = sequence()
    life = [
        happened(1, "started"),
        happened(2, "started", index=3, pid=8),
        happened(3, "exited", index=3, pid=8),
        happened(4, "stack"),
        happened(5, "exited"),
        happened(6, "ended"),
        happened(7, "stacks_done"),
    ]
    assert all(order.is_new(one) for one in life)
    assert order.ended
    assert not any(order.is_new(one) for one in life)


@pytest.mark.parametrize(
    ("events", "wrong"),
    [
        ([happened(1, "started", index=0)], "no process worker 0"),
        ([happened(1, "started", role="ps")], "no process ps 2"),
        ([happened(1, "started", rank=1)], "worker 2 is not rank 1"),
        ([happened(1, "started"), happened(2, "started", pid=9)], "worker 2 started twice"),
        ([happened(1, "exited")], "worker 2 has not started"),
        ([happened(1, "started"), happened(2, "exited", pid=9)], "process 7, and process 9"),
        ([happened(1, "started"), happened(2, "exited"), happened(3, "exited")], "exited twice"),
        ([happened(1, "ended")], "worker 2 has not exited"),
        (
            [happened(1, "ended", error="x"), happened(2, "started")],
            "already reported the end of the job",
        ),
        ([happened(1, "stopping"), happened(2, "stopping")], "sent twice"),
        ([happened(1, "stack", rank=4)], "no rank 4"),
        ([happened(1, "collectives", rank=4)], "no rank 4"),
    ],
)
def test_impossible_events_are_refused(events: list[Happened], wrong: str) -> None:
    order = sequence()
    *before, last = events
    assert all(order.is_new(one) for one in before)
    with pytest.raises(ProtocolError, match=wrong):
        order.is_new(last)


@pytest.mark.parametrize(
    ("file", "name", "right"),
    [
        (DIRECT, "worker-2.out", True),
        (DIRECT, "worker-0.out", False),
        (DIRECT, "rank-2.out", False),
        (TORCHRUN, "torchrun-1.err", True),
        (TORCHRUN, "torchrun-0.err", False),
        (TORCHRUN, "rank-3.err", True),
        (TORCHRUN, "rank-4.err", False),
        (TORCHRUN, "worker-3.err", False),
    ],
)
def test_streams(file: str, name: str, right: bool) -> None:
    found = read_message({"type": "stream", "id": 1, "name": name})
    assert isinstance(found, StreamFound)
    if right:
        sequence(file).check_stream(found)
    else:
        with pytest.raises(ProtocolError):
            sequence(file).check_stream(found)
