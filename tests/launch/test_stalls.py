"""A rank that hangs is named, though another rank writes output without end."""

from __future__ import annotations

import json

import pytest

from support.launching import Scene

TRAIN = """
import os, threading, time

def talk():
    while True:
        print("still here", flush=True)
        time.sleep(0.5)

import torch
import torch.distributed as dist
from dtrain.runtime import progress

def load_batch(step):
    if rank == 2 and step == 13:
        threading.Event().wait()
    return torch.ones(3)

dist.init_process_group("gloo")
rank = dist.get_rank()
if rank == 0:
    threading.Thread(target=talk, daemon=True).start()
for step in range(1, 100):
    dist.all_reduce(load_batch(step))
    progress(step)
"""


@pytest.mark.torch
def test_the_rank_for_which_the_others_wait_is_named(scene: Scene) -> None:
    launch = scene.launch(scene.cluster_file(scene.script(TRAIN)))
    launch.until("dtrain: rank 2 on node1 stands still after step 12, for 1")
    launch.until("rank 2 on node1: in ")
    (listed,) = json.loads(scene.command("ps", "--json").wait().stdout)["runs"]
    assert listed["stall"]["processes"] == ["rank-2"]
    assert listed["stall"]["waiting"] == 3
    launch.process.terminate()
    done = launch.wait()
    assert "; 3 wait for it; collecting stacks" in done.stderr
    assert "called by load_batch" in done.stderr
    assert scene.leftovers() == []
