"""The agent samples its host, its GPUs and its ranks, and no GPU tool can harm a run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from dtrain.messages.telemetry import Sample
from support.node import Agent, Node

TWO_GPUS = """\
0, 00000000:17:00.0, 98, 70144, 81559, 612.33, 700.00, 64, 1980, 1980, 0x04, 0, 61, 2619, 0
1, 00000000:3B:00.0, 31, 81000, 81559, [N/A], 700.00, 88, 1200, 1980, 0x40, 2, 9, 2619, 5
"""


def tool(folder: Path, script: str, name: str = "nvidia-smi") -> dict[str, str]:
    """The environment of an agent whose host has this GPU tool."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def samples(agent: Agent, kind: str = "sample") -> list[Sample]:
    return [Sample.read(body["said"]) for body in agent.messages if body["type"] == kind]


def until_go(host: Node) -> dict[str, Any]:
    return host.shell("until test -e go; do sleep 0.02; done")


def test_samples_arrive_and_an_average_is_kept_for_a_later_relay(
    host: Node, tmp_path: Path
) -> None:
    recording = tmp_path / "recording"
    recording.write_text(TWO_GPUS)
    path = tool(tmp_path / "bin", f"while cat '{recording}'; do sleep 0.1; done")
    agent = host.start(until_go(host), agent=host.agent(environment=path))
    agent.until(lambda: any(one.gpus and one.ranks for one in samples(agent)))
    seen = next(one for one in samples(agent) if one.gpus and one.ranks)
    first, second = seen.gpus
    assert (first.use, first.memory_used, first.power, first.slowed) == (98, 70144, 612.33, 4)
    assert (second.power, second.temperature, second.slowed, second.ecc) == (None, 88, 0x40, 2)
    assert seen.ranks[0].process == "rank-0"
    assert seen.ranks[0].memory > 0
    assert seen.memory is not None
    assert 0 < seen.memory[0] < seen.memory[1]
    assert seen.storage is not None
    assert 0 < seen.storage[0] < seen.storage[1]
    assert seen.losses is not None
    agent.kill()
    (host.workdir / "go").touch()
    second_relay = host.attach()
    second_relay.expect("bye")
    kept = samples(second_relay, "average")
    assert kept
    assert kept[-1].gpus[1].memory_used == 81000
    again = host.attach(offsets={"telemetry": int(kept[-1].time) + 1})
    again.expect("bye")
    assert samples(again, "average") == []
    assert host.processes("nvidia-smi") == {}


def test_processes_of_others_on_a_gpu_are_counted(host: Node, tmp_path: Path) -> None:
    # This test's own process is no part of the run; the worker writes its process id to `pid`.
    uses = f"echo 00000000:17:00.0, {os.getpid()}, 512; echo 00000000:17:00.0, $(cat pid), 70000"
    lists = f"cd {host.workdir}; until test -s pid; do sleep 0.02; done; while {uses}; do sleep 0.1"
    lines = f"while printf '{TWO_GPUS.encode('unicode_escape').decode()}'; do sleep 0.1; done"
    path = tool(tmp_path / "bin", f"case $* in *compute-apps*) {lists}; done;; esac\n{lines}")
    worker = host.shell("echo $$ > pid; until test -e go; do sleep 0.02; done")
    agent = host.start(worker, agent=host.agent(environment=path))

    def others() -> list[tuple[int | None, int | None]]:
        """Of each GPU, in the last sample: its first may not know the worker yet."""
        found = [one for one in samples(agent) if one.gpus]
        return [(gpu.others, gpu.others_memory) for gpu in found[-1].gpus] if found else []

    agent.until(lambda: others() == [(1, 512), (0, 0)])
    (host.workdir / "go").touch()
    agent.expect("bye")
    assert host.processes("nvidia-smi") == {}


@pytest.mark.parametrize(
    "script",
    [
        "trap '' TERM INT; while :; do sleep 600; done",
        "echo 'NVIDIA-SMI has failed'; exit 9",
        "yes '0, a, b, c' ",
        "head -c 4000000 /dev/zero; sleep 600",
    ],
    ids=["hangs", "fails", "floods", "prints no line"],
)
def test_a_broken_gpu_tool_harms_nothing(host: Node, tmp_path: Path, script: str) -> None:
    path = tool(tmp_path / "bin", script)
    agent = host.start(until_go(host), agent=host.agent(environment=path))
    agent.expect("sample")
    assert samples(agent)[0].gpus == ()
    (host.workdir / "go").touch()
    agent.expect("bye")
    assert agent.event("ended")["survivors"] == []
    assert host.processes("nvidia-smi") == {}


def test_what_a_worker_writes_instead_is_not_followed(host: Node) -> None:
    begun = 'cd "$DTRAIN_RUN_DIR"; until test -e telemetry-now; do sleep 0.02; done'
    forge = "rm -f telemetry*; mkfifo telemetry; mkdir telemetry-now; echo ok"
    agent = host.start(host.shell(f"{begun}; {forge}"))
    agent.expect("bye")
    assert agent.text("worker-0.out") == "ok\n"
