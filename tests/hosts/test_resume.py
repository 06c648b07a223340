"""Training that loses a host continues from its last checkpoint, with the loss of a run
without faults."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster import Cluster
from support.cluster import Launcher, job
from support.launching import Done
from support.limits import HANG
from support.recipes import GPT, alone, corpus, losses

pytestmark = pytest.mark.netns
Hosts = Callable[..., Cluster]

STEPS = 7
WAIT_AT = 4
"""The step in which the host is lost. The last checkpoint is from the step before."""
BATCH = 12
ELASTIC = {"elastic": {"min_hosts": 2}}


class Training:
    """A recipe on one worker of each host that is used; the others are spares."""

    def __init__(self, hosts: Hosts, launcher: Launcher) -> None:
        self.cluster, self.launcher = hosts(3), launcher
        self.losses = launcher.folder / "then.json"

    def lose(self, lost: str, notice: str, *, used: int, **document: Any) -> Done:
        """Turn a host off in step WAIT_AT. Returns how the launch ended."""
        self.launcher.notice_silence()
        names = [host.name for host in self.cluster.hosts]
        saved = ["--checkpoint", str(self.launcher.folder / "saved"), "--save-every", "1"]
        document["args"] += [*saved, "--steps", str(STEPS), "--losses", str(self.losses)]
        document |= {
            "script": job("waiting.py"),
            "env": {"WAIT_AT": str(WAIT_AT)},
            "training": {"global_batch": BATCH},
            "restart": {"max": 1, "node_timeout": "2s"},
            "grace": "1s",
        }
        file = self.launcher.file(self.cluster, document, hosts=names[:used], spares=names[used:])
        launch = self.launcher.start(file)
        launch.until("waits\n")
        self.cluster.power_off(lost)
        launch.until(notice)
        done = launch.wait(timeout=HANG)
        assert done.code == 0, str(done)
        assert self.launcher.left(self.cluster) == {}
        return done


@pytest.fixture
def training(hosts: Hosts, launcher: Launcher) -> Training:
    return Training(hosts, launcher)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("used", "lost", "notice", "elastic"),
    [
        (2, "node2", "node3 replaces node2", {}),
        (3, "node1", "without node1: 2 of 3 hosts, data 2 instead of 3", ELASTIC),
    ],
    ids=["spare", "elastic"],
)
def test_torch(
    training: Training, tmp_path: Path, used: int, lost: str, notice: str, elastic: dict[str, Any]
) -> None:
    options = [*GPT, "--data", str(corpus(tmp_path))]
    done = training.lose(
        lost,
        notice,
        used=used,
        framework="torch",
        strategy="fsdp",
        args=["train_gpt", *options],
        **elastic,
    )
    assert f"resumed after step {WAIT_AT - 1}" in done.stdout
    assert done.stdout.count(f"{BATCH} sequences of 32 a step") == 2
    options += ["--steps", str(STEPS), "--batch", str(BATCH)]
    in_one_go = alone("train_gpt.py", tmp_path, options)
    assert losses(training.losses) == pytest.approx(in_one_go[WAIT_AT - 1 :], rel=1e-4)


@pytest.mark.tensorflow
def test_tensorflow(training: Training, tmp_path: Path) -> None:
    options = ["--loop", "custom", "--every", "1"]
    training.lose(
        "node1",
        "without node1: 2 of 3 hosts",
        used=3,
        framework="tensorflow",
        strategy="multi_worker_mirrored",
        args=["classify_images", *options],
        **ELASTIC,
    )
    options += ["--steps", str(STEPS), "--batch", str(BATCH)]
    in_one_go = alone("classify_images.py", tmp_path, options)
    assert losses(training.losses) == pytest.approx(in_one_go[WAIT_AT - 1 :], rel=1e-3)
