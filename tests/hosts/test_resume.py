"""A training that loses a host goes on from its last checkpoint, and its loss as if nothing had
happened."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from cluster import Cluster
from support.cluster import Launcher, job
from support.gpt import GPT, alone, corpus, losses

pytestmark = [pytest.mark.netns, pytest.mark.torch]
Hosts = Callable[..., Cluster]

STEPS = 7
WAIT_AT = 4
"""The step in which the host is lost: the last checkpoint is of the one before."""
BATCH = 12


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def in_one_go(text: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return alone(text, tmp_path_factory.mktemp("alone"), steps=STEPS, batch=BATCH)


@pytest.mark.parametrize(
    ("used", "lost", "elastic", "told"),
    [
        (["node1", "node2"], "node2", {}, "node3 takes the place of node2"),
        (
            ["node1", "node2", "node3"],
            "node1",
            {"elastic": {"min_hosts": 2}},
            "without node1: 2 of 3 hosts, data 2 instead of 3",
        ),
    ],
    ids=["spare", "elastic"],
)
def test_the_loss_goes_on(
    hosts: Hosts,
    launcher: Launcher,
    text: Path,
    in_one_go: list[float],
    used: list[str],
    lost: str,
    elastic: Mapping[str, Any],
    told: str,
) -> None:
    cluster = hosts(3)
    launcher.notice_silence()
    written = launcher.folder / "losses.json"
    options = ["--data", text, "--steps", STEPS, "--losses", written]
    options += ["--checkpoint", launcher.folder / "saved", "--save-every", "1"]
    file = launcher.file(
        cluster,
        {
            "framework": "torch",
            "strategy": "fsdp",
            "script": job("waiting_gpt.py"),
            "args": [*GPT, *map(str, options)],
            "env": {"WAIT_AT": str(WAIT_AT)},
            "training": {"global_batch": BATCH},
            "restart": {"max": 1, "node_timeout": "2s"},
            "grace": "1s",
            **elastic,
        },
        hosts=used,
        spares=[host.name for host in cluster.hosts if host.name not in used],
    )
    launch = launcher.start(file)
    launch.until("waits\n", count=len(used))
    cluster.power_off(lost)
    launch.until(told)
    done = launch.wait(timeout=120)
    assert done.code == 0, str(done)
    assert f"resumed after step {WAIT_AT - 1}" in done.stdout
    assert done.stdout.count(f"{BATCH} sequences of 32 a step") == 2
    before = [float(loss) for loss in re.findall(r"step \d+/7 loss ([0-9.]+)", done.stdout)]
    assert before[: WAIT_AT - 1] == pytest.approx(in_one_go[: WAIT_AT - 1], abs=1e-3)
    assert losses(written) == pytest.approx(in_one_go[WAIT_AT - 1 :], rel=1e-4)
    assert launcher.left(cluster) == {}
