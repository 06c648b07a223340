"""Processes of each framework meet on the machines of a job that dtrain launches."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from support.cluster import Launcher, job
from support.slurm import Slurm, WriteJob

pytestmark = [pytest.mark.slurm, pytest.mark.netns]


@pytest.mark.parametrize(
    ("script", "result", "framework"),
    [
        pytest.param(
            "allreduce_torch.py",
            {"sum": 3.0},
            {"framework": "torch", "rendezvous": {"backend": "c10d"}},
            marks=pytest.mark.torch,
            id="torchrun",
        ),
        pytest.param(
            "tf_worker.py",
            {"slope": 3.0},
            {"framework": "tensorflow", "strategy": "multi_worker_mirrored"},
            marks=pytest.mark.tensorflow,
            id="tensorflow",
        ),
    ],
)
def test_processes_meet(
    slurm: Slurm,
    launcher: Launcher,
    write_job: WriteJob,
    script: str,
    result: dict[str, float],
    framework: dict[str, Any],
) -> None:
    cluster = {"slurm": {}, "nodes": 2, "slots": 1, "gpus": 0, "python": sys.executable}
    file = write_job("", cluster=cluster, script=str(job(script)), **framework)
    done = launcher.run(file, "--no-check", env=slurm.environment)
    assert done.code == 0, str(done)
    said = [line.partition("] ")[2] for line in done.stdout.splitlines()]
    found = [json.loads(line) for line in said if line.startswith("{")]
    assert len(found) == 2, str(done)
    for one in found:
        assert {name: one[name] for name in result} == pytest.approx(result, abs=0.1)
