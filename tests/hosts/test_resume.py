"""Training that loses a host continues on the others from its last checkpoint, with the loss of a
run without faults.

`test_survive.py` replaces a lost host with a spare; there the layout stays the same, and
`tests/runtime/torch/test_checkpoint.py` continues in it.
`tests/runtime/tensorflow/test_several_workers.py` shows fewer workers of TensorFlow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster import Cluster
from support.cluster import Launcher, job
from support.limits import HANG
from support.recipes import GPT, alone, corpus, losses

pytestmark = pytest.mark.netns
Hosts = Callable[..., Cluster]

STEPS = 4
WAIT_AT = 2
"""The step in which the host is lost. The last checkpoint is from the step before."""
BATCH = 12


@pytest.mark.torch
def test_torch(hosts: Hosts, launcher: Launcher, tmp_path: Path) -> None:
    """With one worker on each of three hosts. The host of rank 0 is turned off in step WAIT_AT."""
    cluster, found = hosts(3), launcher.folder / "then.json"
    options = [*GPT, "--data", str(corpus(tmp_path)), "--steps", str(STEPS)]
    saved = ["--checkpoint", str(launcher.folder / "saved"), "--save-every", "1"]
    document: dict[str, Any] = {
        "framework": "torch",
        "strategy": "fsdp",
        "script": job("waiting.py"),
        "args": [*options, *saved, "--losses", str(found)],
        "env": {"WAIT_AT": str(WAIT_AT)},
        "training": {"global_batch": BATCH},
        "restart": {"max": 1, "node_timeout": "2s"},
        "grace": "1s",
        "elastic": {"min_hosts": 2},
    }
    launcher.notice_silence()
    launch = launcher.start(launcher.file(cluster, document), "--no-check")
    launch.until("waits\n")
    cluster.power_off("node1")
    launch.until("without node1: 2 of 3 hosts, data 2 instead of 3")
    done = launch.wait(timeout=HANG)
    assert done.code == 0, str(done)
    assert launcher.left(cluster) == {}
    assert f"resumed after step {WAIT_AT - 1}" in done.stdout
    assert done.stdout.count(f"{BATCH} sequences of 32 a step") == 2
    in_one_go = alone("train_gpt.py", tmp_path, [*options, "--batch", str(BATCH)])
    assert losses(found) == pytest.approx(in_one_go[WAIT_AT - 1 :], rel=1e-4)
