"""Training that loses a host continues on the others from its last checkpoint, with the loss of a
run without faults.

`test_survive.py` replaces a lost host with a spare; there the layout stays the same, and
`tests/runtime/torch/test_checkpoint.py` continues in it."""

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


class Training:
    """A recipe on one worker of each of three hosts."""

    def __init__(self, hosts: Hosts, launcher: Launcher) -> None:
        self.cluster, self.launcher = hosts(3), launcher
        self.losses = launcher.folder / "then.json"

    def lose(self, lost: str, notice: str, **document: Any) -> Done:
        """Turn a host off in step WAIT_AT. Returns how the launch ended."""
        self.launcher.notice_silence()
        saved = ["--checkpoint", str(self.launcher.folder / "saved"), "--save-every", "1"]
        document["args"] += [*saved, "--steps", str(STEPS), "--losses", str(self.losses)]
        document |= {
            "script": job("waiting.py"),
            "env": {"WAIT_AT": str(WAIT_AT)},
            "training": {"global_batch": BATCH},
            "restart": {"max": 1, "node_timeout": "2s"},
            "grace": "1s",
            "elastic": {"min_hosts": 2},
        }
        file = self.launcher.file(self.cluster, document)
        launch = self.launcher.start(file, "--no-check")
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
def test_torch(training: Training, tmp_path: Path) -> None:
    options = [*GPT, "--data", str(corpus(tmp_path))]
    done = training.lose(
        "node1",
        "without node1: 2 of 3 hosts, data 2 instead of 3",
        framework="torch",
        strategy="fsdp",
        args=["train_gpt", *options],
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
        framework="tensorflow",
        strategy="multi_worker_mirrored",
        args=["classify_images", *options],
    )
    options += ["--steps", str(STEPS), "--batch", str(BATCH)]
    in_one_go = alone("classify_images.py", tmp_path, options)
    assert losses(training.losses) == pytest.approx(in_one_go[WAIT_AT - 1 :], rel=1e-3)
