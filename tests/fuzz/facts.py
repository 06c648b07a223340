"""Fuzz targets: answers of the facts program, for the decoder, the checks and a preflight."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from dtrain.checks import Evidence, HostFacts
from dtrain.checks.bandwidth import calibration, fabric
from dtrain.checks.judgement import judge
from dtrain.diagnostics import NodeError
from dtrain.launchplan.build import build
from dtrain.launchplan.plan import HostPlan, LaunchPlan
from dtrain.messages import facts
from dtrain.messages.decode import ProtocolError, parse_object
from dtrain.node.facts.wire import PREAMBLE
from dtrain.session.facts.gather_order import THOROUGH
from dtrain.session.facts.host_connections import HostConnections
from dtrain.session.facts.preflight import Preflight
from dtrain.spec.load import parse
from dtrain_cli import first_file
from fuzz.mutation import Target, damaged, mutated
from support.scripted import ScriptedHosts

MACHINES = Path(__file__).parents[1] / "checks" / "machines"
FILE = """
cluster: {hosts: [bad, good, fine], gpus: 1, network: {interface: eth0}}
job: {framework: torch, script: train.py, setup: ["true"], workdir: /w}
"""
GIB = 1 << 30


def _gpu() -> dict[str, Any]:
    process = {"pid": 7, "name": "python3", "user": "ml", "used": 2 * GIB}
    return {
        "index": 0,
        "name": "NVIDIA H100 80GB HBM3",
        "uuid": "GPU-1",
        "bus": "00000000:3B:00.0",
        "memory": 80 * GIB,
        "used": 50 * GIB,
        "mig": "Disabled",
        "compute_mode": "Default",
        "temperature": 40,
        "uncorrected": 0,
        "remap_pending": "No",
        "remap_failed": "No",
        "slowed": ["hw_slowdown"],
        "link_width": 16,
        "processes": [process],
    }


@cache
def _gathered() -> list[str]:
    """Valid answers as JSON: recorded machines, plus facts that no recording has."""
    found = []
    for path in sorted(MACHINES.glob("*/facts.json")):
        text = path.read_text().replace("HOST", "bad").replace("OTHER", "good")
        one = json.loads(text.replace("NUMBER", "7"))
        interface = {"addresses": ["10.0.0.7", "fe80::1"], "up": True, "state": "up"}
        interface |= {"mtu": 1500, "speed": 25000}
        one["network"] = {"interfaces": {"eth0": interface}, "routes": {"good": "eth0"}}
        one["gpus"] = {"tool": "nvidia-smi", "driver": "550.54", "cuda": "12.4", "gpus": [_gpu()]}
        one["gpus"] |= {"xids": {"0000:3b:00 79": 2}, "pci": {"NVIDIA": 1}}
        one["ports"] = {"29500": {"free": False, "reason": "in use", "holder": "process 7"}}
        one["leftovers"] = {"old-run": [7, 8]}
        one["memory"] = {"total": 64 * GIB, "available": GIB, "limit": 32 * GIB}
        one["infiniband"] = {"mlx5_0/1": {"state": "ACTIVE", "rate": 400}}
        framework = {"version": "2.6.0+cu124", "cuda": "12.4", "gpus": 1, "distributed": True}
        framework |= {"nccl": "2.21.5", "capability": "9.0", "architectures": ["sm_80", "sm_90"]}
        limits = {"memlock": 1 << 20, "nofile": 1024, "nproc": 512}
        one["interpreter"] = {"status": 0, "python": "3.11.2", "limits": limits}
        one["interpreter"] |= {"framework": framework, "packages": {"numpy": "2.0.0"}}
        script = {"workdir": "/w", "workdir_exists": True, "path": "/w/train.py", "exists": True}
        one["script"] = {**script, "digest": "ab" * 32, "code": {"a.py": "12"}}
        found.append(json.dumps({"facts": one, "listening": {"port": 40000}}))
    return found


def _dialed() -> dict[str, Any]:
    """Answers for the targets in `DIALED`."""
    errors: list[dict[str, Any]] = [
        {"error": "connection refused"},
        {"error": "stalled", "mss": 1448},
        {"error": "wrong", "answered": "fine"},
        {"mss": 1448, "source": "10.0.0.7"},
    ]
    names = ("host", "kind", "address", "port")
    return {
        "dialed": [
            {**dict(zip(names, target, strict=False)), **error}
            for target, error in zip(DIALED, errors, strict=True)
        ]
    }


DIALED: list[facts.DialTarget] = [
    ("good", "address", "good", 40000, None),
    ("good", "interface", "10.0.0.8", 40000, "10.0.0.7"),
    ("fine", "port", "fine", 29500, None),
    ("fine", "address", "fine", 40000, None),
]
REHEARSED: list[dict[str, Any]] = [
    {"rank": 0, "failed": "", "backend": "gloo", "seconds": 1.0, "missing": []},
    {"failed": "group", "error": "timeout", "pairs": [[0, 1, "timeout"], [0, 2, "timeout"]]},
    {"failed": "store", "error": "refused"},
    {"task": ["worker", 0], "failed": "", "silent": [["worker", 1]]},
]
MEASURED: list[dict[str, Any]] = [
    {
        "rank": 0,
        "failed": "",
        "backend": "gloo",
        "all": [[65536, 0.001], [1048576, 0.01]],
        "inside": [[65536, 0.001]],
        "pairs": [[0, 1, 1048576, 0.01], [1, 0, 1048576, 0.02], [0, 2, 1048576, 0.5]],
    },
    {"failed": "group", "error": "timeout"},
]


@cache
def _plan() -> LaunchPlan:
    return build(parse(FILE, "cluster.yaml"))


def answers(random: Random) -> bytes:
    """Four lines: the gathered, dialed, rehearsed and measured facts."""
    gathered = json.loads(random.choice(_gathered()))
    reports = [json.dumps(random.choice(kinds)) for kinds in (REHEARSED, MEASURED)]
    odd = random.choice((0, 0, 0, 1, 2, 3, 4, 5))
    if odd > 3:
        kinds = (REHEARSED, MEASURED)[odd - 4]
        reports[odd - 4] = mutated(random, random.choice(kinds)).decode("utf-8", "replace")
    lines = [gathered, _dialed(), {"said": reports[:1]}, {"status": 0, "said": reports[1:]}]
    return b"\n".join(
        mutated(random, line) if at == odd else json.dumps(line).encode()
        for at, line in enumerate(lines)
    )


def judge_answers(data: bytes) -> None:
    """Judge all answers of one host together with those of two good hosts."""
    plan = _plan()
    try:
        gathered, dialed, rehearsed, measured = map(parse_object, data.split(b"\n"))
        ports, setup = plan.hosts[0].ports, plan.job.setup
        bad = facts.read_gathered(gathered, ports, setup)
        evidence = Evidence(
            plan,
            (
                HostFacts(plan.hosts[0], bad["facts"], facts.read_dialed(dialed, DIALED)),
                *map(_good, plan.hosts[1:]),
            ),
            rehearsal=_by_host(facts.read_ran(rehearsed, facts.REHEARSED)[1], REHEARSED[0]),
            bandwidth=_by_host(facts.read_ran(measured, facts.MEASURED)[1], MEASURED[0]),
        )
    except (ProtocolError, ValueError) as error:
        # Not four lines: ValueError.
        assert len(str(error)) < 1000
        return
    judge(evidence)
    found = fabric(evidence)
    if found is not None:
        json.dumps(calibration(found))
    answered = first_file.Answers(("bad", "good", "fine"), "torch", "train.py")
    first_file.text(answered, evidence).encode()


def _good(part: HostPlan) -> HostFacts:
    found = facts.read_gathered(json.loads(_gathered()[0]), (29500,), ("true",))
    return HostFacts(part, found["facts"])


def _by_host(bad: tuple[dict[str, Any], ...], good: dict[str, Any]) -> dict[str, Any]:
    """Answers by host, plus the fields that the preflight adds."""
    by_rank = [*bad[:1], good, good] if bad else [good, good, good]
    return {
        part.host.name: ({"silent": (), **reports, "rank": rank, "task": ("worker", rank)},)
        for rank, (part, reports) in enumerate(zip(_plan().hosts, by_rank, strict=True))
    }


def program_output(random: Random) -> bytes:
    """The stdout of the facts program of one host: preamble, clock, facts, dialed, ranks."""
    clock = [json.dumps({"time": 1.7e9}).encode() for _ in range(5)]
    if random.random() < 0.2:
        clock[0] = mutated(random, {"time": 1.7e9})
    lines = [*clock, *answers(random).split(b"\n")]
    noise = random.choice((b"", b"Welcome\n"))
    return damaged(random, noise + PREAMBLE + b"\n".join(lines) + b"\n")


def preflight(data: bytes) -> None:
    """Do the same as `dtrain check --rendezvous --bandwidth`."""
    good = PREAMBLE + b"".join(json.dumps({"time": 1.7e9}).encode() + b"\n" for _ in range(5))
    gathered = json.loads(_gathered()[0])
    # Only the first host has ports.
    gathered["facts"]["ports"] = {}
    good += json.dumps(gathered).encode() + b"\n" + json.dumps({"dialed": []}).encode() + b"\n"
    hosts = {"bad": data, "good": good, "fine": good}
    looking = Preflight(_plan(), HostConnections(ScriptedHosts(hosts)), base=Path("/"))
    try:
        evidence = looking.measure(looking.rehearse(looking.look(THOROUGH)))
    finally:
        looking.close()
    assert all(isinstance(failure, NodeError) for failure in evidence.failures)
    blamed = {failure.host for failure in evidence.failures}
    # The other hosts have no answers of ranks, and do not cause the problems of this one.
    if len(evidence.hosts) < 3:
        assert blamed == {"bad"}
    judge(evidence)


TARGETS: list[Target] = [
    ("facts", answers, judge_answers),
    ("preflight", program_output, preflight),
]
