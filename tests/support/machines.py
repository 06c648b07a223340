"""Recorded machines of many kinds, as the facts of two hosts of each kind.

A folder in `tests/checks/machines/` is one kind: the facts of a host (`facts.json`), what its GPU
tool prints (`nvidia-smi.xml`, `rocm-smi.json`, or how it fails), and the differences of the
second host (`second.json`). The GPU tool's output goes through the program that gathers facts on
hosts, through a fake tool on PATH.
"""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dtrain.checks import Evidence, HostFacts
from dtrain.launchplan.build import build
from dtrain.messages.facts import read_gathered
from dtrain.session.facts.conversation import Conversation
from dtrain.spec.model import Host
from dtrain.transport.local import LocalTransport
from support.specs import read

MACHINES = Path(__file__).parents[1] / "checks" / "machines"
KINDS = sorted(path.name for path in MACHINES.iterdir())


def stand_in(folder: Path, kind: Path) -> None:
    """Create a GPU tool that prints the recorded output."""
    for recorded in kind.glob("*-smi.*"):
        tool = folder / recorded.stem
        status = 1 if recorded.suffix == ".fails" else 0
        tool.write_text(f"#!/bin/sh\ncat '{recorded}'\nexit {status}\n")
        tool.chmod(0o755)


def gathered(host: str) -> dict[str, Any]:
    """The GPU facts of this machine, by the real program."""
    plan = build(read(MACHINES / "no-gpu" / "cluster.yaml"), local_python="python3")
    connection = LocalTransport().connect(Host(host, "127.0.0.1", transport="local"))
    conversation = Conversation(plan.hosts[0], connection)
    conversation.begin([plan.hosts[0].python])
    try:
        order: Any = {
            "op": "gather", "host": host, "token": "", "probes": ["gpus"], "ports": [],
            "draw": None,
        }  # fmt: skip
        answer = conversation.ask(order, partial(read_gathered, ports=(), setup=()))
        facts: dict[str, Any] = dict(answer["facts"]["gpus"])
    finally:
        conversation.close()
        connection.close()
    # What this machine itself has is no part of the recording.
    facts.pop("pci", None)
    return facts | ({"xids": {}} if "xids" in facts else {})


def recorded(path: Path, host: str, other: str) -> dict[str, Any]:
    text = path.read_text() if path.exists() else "{}"
    number = host.lstrip("gpu0")
    for mark, value in (("HOST", host), ("OTHER", other), ("NUMBER", number)):
        text = text.replace(mark, value)
    facts: dict[str, Any] = json.loads(text)
    return facts


def recorded_evidence(kind: str, tools: Path, monkeypatch: pytest.MonkeyPatch) -> Evidence:
    """Two hosts of one kind; ``tools`` is an empty folder."""
    folder = MACHINES / kind
    stand_in(tools, folder)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setenv("LANG", "de_DE.UTF-8")
    plan = build(read(folder / "cluster.yaml"))
    hosts = []
    for part, other in zip(plan.hosts, reversed(plan.hosts), strict=True):
        name = part.host.name
        facts = recorded(folder / "facts.json", name, other.host.name)
        if part.host.gpus:
            facts["gpus"] = gathered(name)
            for gpu in facts["gpus"].get("gpus", ()):
                gpu["uuid"] = f"{gpu['uuid']}-{name}"  # two machines of one kind
        if part.node_rank == 1:
            facts |= recorded(folder / "second.json", name, other.host.name)
        hosts.append(HostFacts(part, facts, latency=0.001))
    return Evidence(plan, tuple(hosts))
