"""A rank that hangs is named, though another rank writes output without end.

The process group is gloo's. The answer of NCCL's RAS service comes from a server in rank 0.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.launching import Scene
from support.ports import free_port

TRAIN = """
import os, sys, threading, time
sys.path.append(sys.argv[1])
from support.ras import RasServer

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
    RasServer(port=int(sys.argv[2]))
    threading.Thread(target=talk, daemon=True).start()
for step in range(1, 100):
    dist.all_reduce(load_batch(step))
    progress(step)
"""


@pytest.mark.torch
def test_the_rank_for_which_the_others_wait_is_named(scene: Scene) -> None:
    port = free_port()
    file = scene.cluster_file(
        scene.script(TRAIN),
        args=[str(Path(__file__).resolve().parents[1]), str(port)],
        env={"NCCL_RAS_ADDR": f"127.0.0.1:{port}"},
    )
    launch = scene.launch(file, "--no-check")
    launch.until("dtrain: rank 2 on node1 stands still after step 12, for ")
    launch.until("rank 2 on node1: in ")
    launch.until("dtrain: NCCL: rank 2 (process 1650386 on 10.0.0.2) of communicator 27a079b828ff")
    (listed,) = json.loads(scene.command("ps", "--json").wait().stdout)["runs"]
    assert listed["stall"]["processes"] == ["rank-2"]
    assert listed["stall"]["waiting"] == 3
    launch.process.terminate()
    done = launch.wait()
    assert "; 3 wait for it; collecting stacks" in done.stderr
    assert "called by load_batch" in done.stderr
    assert scene.leftovers() == []
