"""A slow rank of a real DistributedDataParallel job is named."""

from __future__ import annotations

import json

import pytest

from support.launching import Scene

# Sleeping takes no CPU, so a busy machine changes little. Rank 1 is slow, and all ranks finish each
# step together.
TRAIN = """
import os, sys, time
from pathlib import Path
import torch
from dtrain.runtime import torch as parallel

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x):
        time.sleep(0.09 if os.environ["RANK"] == "1" else 0.03)
        return self.layer(x)

data = torch.utils.data.TensorDataset(torch.ones(64, 4), torch.ones(64, 4))
torch.manual_seed(0)
with parallel.init(training=parallel.Training(global_batch=4)) as run:
    model = run.parallelize(Net(), loss=torch.nn.functional.mse_loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for inputs, targets in run.batches(data):
        model.gradients(inputs, targets)
        model.step(optimizer)
        if run.rank == 0 and Path(sys.argv[1]).exists():
            os.kill(os.getpid(), 15)
        if run.should_stop():
            break
"""


@pytest.mark.torch
def test_a_slow_rank_in_lock_step_is_named(scene: Scene) -> None:
    stop = scene.folder / "stop"
    file = scene.cluster_file(scene.script(TRAIN), slots=1, args=[str(stop)])
    launch = scene.launch(file, "--no-check")
    launch.until("dtrain: rank 1 on node1 is ")
    (listed,) = json.loads(scene.command("ps", "--json").wait().stdout)["runs"]
    stop.touch()
    done = launch.wait()
    assert done.code == 0, str(done)
    assert "% slower than the others: " in done.stderr  # the cause depends on this machine
    assert listed["stragglers"]["processes"] == ["rank-1"]
    assert listed["stragglers"]["slower"] > 0.2
    journal = (scene.run_folder() / "journal.jsonl").read_text().splitlines()
    events = {event["event"]: event for event in map(json.loads, journal)}
    assert events["stragglers"]["found"]["hosts"] == ["node1"]
    assert events["finished"]["stragglers"]["processes"] == ["rank-1"]
