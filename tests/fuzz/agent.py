"""Fuzz targets: output of a relay, for the decoder and for a whole attempt."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

from dtrain.diagnostics import ExitCode
from dtrain.engines.ssh.attempt import Attempt
from dtrain.engines.ssh.inquiry import ask
from dtrain.failures.cause import Report
from dtrain.launchplan.build import build
from dtrain.launchplan.plan import LaunchPlan
from dtrain.messages.agent import Happened, StreamFound, read_message
from dtrain.messages.decode import ProtocolError
from dtrain.messages.sequence import MessageSequence
from dtrain.node import protocol
from dtrain.node.agent.wire import PREAMBLE, encode
from dtrain.runs import journal
from dtrain.runs.events import HostEvent
from dtrain.runs.record import Record
from dtrain.runs.request import Request
from dtrain.spec.load import parse
from fuzz.mutation import Target, damaged, mutated
from support.attempts import context_of
from support.scripted import ScriptedHosts, relay_stdout

FILE = """
cluster: {hosts: [bad, good], gpus: 2}
job:
  framework: torch
  script: train.py
  env: {DTRAIN_TENSORBOARD: "1"}
  restart: {node_timeout: 1s}
"""
GROUPS = [
    {
        "id": "0",
        "name": "default_pg",
        "ranks": [0, 1],
        "calls": [
            {
                "seq": 3,
                "op": "nccl:all_reduce",
                "tensors": [["Float", [4, 3]]],
                "done": False,
                "frames": [["step", "/w/train.py", 40]],
            }
        ],
    }
]


def _worker(index: int) -> dict[str, Any]:
    return {"role": "worker", "index": index, "rank": index}


def _events() -> list[dict[str, Any]]:
    at: dict[str, Any] = {"time": 1.7e9}
    error = {"message": "ValueError: x", "traceback": "Traceback", "time": 1.7e9}
    failed = {"code": 1, "signal": None, "stopping": False, "error": error, "out_of_memory": False}
    lines = [[1.7e9, "NVRM: Xid (PCI:0000:3b:00): 79, pid=7, GPU has fallen off the bus."]]
    return [
        *({"event": "started", **at, **_worker(index), "pid": 7 + index} for index in (0, 1)),
        {"event": "stack", **at, **_worker(0), "text": 'Thread 0x1: "main"'},
        {"event": "collectives", **at, "rank": 0, "groups": GROUPS},
        {"event": "stacks_done", **at},
        {"event": "exited", **at, **_worker(0), "pid": 7, **failed, "ranks": None},
        {"event": "kernel", **at, "lines": lines, "gpus": ["0000:3b:00.0"]},
        {"event": "stopping", **at, "reason": "asked"},
        {"event": "exited", **at, **_worker(1), "pid": 8, **failed, "stopping": True},
        {"event": "ended", **at, "survivors": [{"pid": 9, "name": "x"}]},
    ]


def _session() -> list[Any]:
    """Everything that a relay may send: messages, and pairs of a stream and its output."""
    sent: list[Any] = [
        {"type": "hello", "time": 1.7e9} | {"pid": 3},
        {"type": "prepared", "workdir": "/w", "folder": "/f"},
    ]
    for number, index in enumerate((0, 1), 1):
        sent.append({"type": "stream", "id": number, "name": f"worker-{index}.out"})
    progress = {"event": "progress", "time": 1.7e9, "step": 3, "total": 9, "loss": 0.5}
    progress |= {"tokens": 12, "metrics": {"lr": 0.1}}
    sample = {"time": 1.7e9, "cpus": 8, "cpu": 2.5, "memory": [10, 100], "disk": None}
    sample |= {"network": [1000.0, 2.0], "infiniband": None, "ranks": [["rank-0", 1.5, 4096, 12]]}
    sample |= {"gpus": [[0, 97, 70144, 81559, 612.5, 700, 64, 1980, 1980, 4, 0, 0]]}
    sent += [
        {"type": "sample", "said": sample},
        {"type": "average", "said": sample},
        (1, b"hello\n"),
        {"type": "progress", "name": "rank-0.progress", "offset": 90, "said": progress},
        *(
            {"type": "event", "offset": 100 * at, "event": event}
            for at, event in enumerate(_events(), 1)
        ),
        {"type": "bye"},
    ]
    return sent


_OTHERS: list[Any] = [
    {"type": "refused", "what": "port", "reason": "port 29500 is taken", "hint": ""},
    {"type": "refused", "what": "gone", "reason": "no run", "hint": ""},
    {"type": "attached"},
    {"type": "alive", "supervisor": 7, "silent": 0.0, "time": 1e9},
    {"type": "notice", "text": "a file is too long"},
    {"type": "lost", "reason": "it died", "survivors": []},
    {"type": "status", "state": "running", "since": 1.7e9, "why": "", "processes": []},
    {"type": "pong"},
    (2, b"x" * 100),
]


def _frame(random: Random, one: Any) -> bytes:
    if isinstance(one, tuple):
        stream, payload = one
        stream += random.choice((0, 0, 0, 1, 2**31))
        offset = random.choice((0, 0, 0, 6, 1000, 2**64 - 1))
        return protocol.HEADER.pack(protocol.DATA, stream, offset, len(payload)) + payload
    payload = mutated(random, one) if random.random() < 0.15 else json.dumps(one).encode()
    return protocol.HEADER.pack(protocol.MESSAGE, 0, 0, len(payload)) + payload


def relay_output(random: Random, *, attached: bool = False) -> bytes:
    sent = _session()
    if attached:
        sent[1] = {"type": "attached"}
    for _ in range(random.choice((0, 1, 1, 2, 5))):
        at, other = random.randrange(len(sent)), random.randrange(len(sent))
        match random.randrange(4):
            case 0:
                sent.insert(at, random.choice(_OTHERS))
            case 1:
                sent.insert(at, sent[other])
            case 2:
                sent[at], sent[other] = sent[other], sent[at]
            case _:
                del sent[at]
    noise = random.choice((b"", b"", b"Welcome\n", PREAMBLE[:5]))
    whole = noise + PREAMBLE + b"".join(_frame(random, one) for one in sent)
    return damaged(random, whole)


@cache
def _plan() -> LaunchPlan:
    plan = build(parse(FILE, "cluster.yaml"))
    restart = replace(plan.job.restart, node_timeout=0.05)
    return replace(plan, job=replace(plan.job, restart=restart))


def decode_output(data: bytes) -> None:
    """The decoder and the checks, without a link."""
    plan = _plan()
    decoder, sequence = protocol.FrameDecoder(), MessageSequence(plan.hosts[0], plan.world_size)
    sequence.begin_relay()
    try:
        for at in range(0, len(data), 997):
            for frame in decoder.feed(data[at : at + 997]):
                if isinstance(frame, protocol.Data):
                    continue
                message = read_message(frame.body)
                sequence.check_message(message, started=True)
                if isinstance(message, Happened) and sequence.is_new(message):
                    journal.encode(1.7e9, HostEvent("a", message.offset, message.event.as_json()))
                elif isinstance(message, StreamFound):
                    sequence.check_stream(message)
    except ProtocolError as error:
        assert len(str(error)) < 1000
        assert str(error).isprintable()


def _status(random: Random) -> bytes:
    fate = {"started": 1.7e9, "ended": None, "code": None, "signal": None}
    seen = {"type": "status", "state": "running", "since": 1.7e9, "why": ""}
    sent = [_session()[0], {**seen, "processes": [{**_worker(0), "pid": 7, **fate}]}]
    return damaged(random, relay_stdout(mutated(random, one) for one in sent))


def inquire(data: bytes) -> None:
    """The query of `dtrain ps RUN` to the hosts."""
    record = Record("run", Request("cluster.yaml", "/", FILE), 29500, "python3", 0.0)
    found = ask(record, {}, ScriptedHosts({"bad": data, "good": b""}))
    assert found.keys() == {"bad", "good"}


def attempt(data: bytes) -> Report:
    """A whole attempt with one hostile host, and one that refuses immediately."""
    plan = _plan()
    refusal = {"type": "refused", "what": "workdir", "reason": "no such folder"}
    good = relay_stdout(map(encode, (_session()[0], refusal)))
    alone = replace(plan, hosts=plan.hosts[:1]) if len(data) % 2 else plan
    # A link that nobody waits for may still write while the folder is removed.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        hosts = ScriptedHosts({"bad": data, "good": good})
        context = replace(context_of(hosts, Path(folder), FILE), plan=alone)
        attached = b'"attached"' in data
        one = Attempt(context, lambda: None)
        return one.attach({"bad": {}, "good": {}}, {}, 1.0) if attached else one.run()


def attempt_is_sound(data: bytes) -> None:
    report = attempt(data)
    assert report.exit_code in (ExitCode.OK, ExitCode.JOB_FAILED, ExitCode.NODE_FAILED), report
    if report.exit_code is ExitCode.NODE_FAILED:
        assert any("bad" in problem or "good" in problem for problem in report.problems), report


TARGETS: list[Target] = [
    ("relay", relay_output, decode_output),
    ("inquiry", _status, inquire),
    ("launch", relay_output, attempt_is_sound),
    ("attach", partial(relay_output, attached=True), attempt_is_sound),
]
