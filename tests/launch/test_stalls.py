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
    script = scene.script(TRAIN)
    file = scene.cluster_file(
        script,
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
    run = listed["run"]
    # With a launcher, and without one: then the command takes charge, and the job goes on.
    for _ in range(2):
        asked = scene.command("stacks", run, "--json").wait()
        most, rest = json.loads(asked.stdout)["groups"]
        assert [worker["worker"] for worker in most["workers"]] == ["0", "1", "3"], str(asked)
        assert rest["workers"] == [{"host": "node1", "worker": "2"}]
        assert rest["frames"][-2:] == [f"load_batch ({script}:17)", f"<module> ({script}:26)"]
        launch.kill()
    done = launch.wait()
    assert "; 3 wait for it; collecting stacks" in done.stderr
    assert "called by load_batch" in done.stderr
    assert scene.command("stop", run).wait().code == 0
    assert scene.leftovers() == []
