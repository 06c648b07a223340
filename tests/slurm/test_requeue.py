"""A job that Slurm interrupts goes on from its checkpoint."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.cluster import Launcher, job
from support.launching import IDLE
from support.recipes import GPT, alone, corpus, losses
from support.slurm import Slurm, WriteJob

pytestmark = [pytest.mark.slurm, pytest.mark.netns]

STEPS, BATCH = 7, 12
WAIT_AT = (2, 4)


@pytest.fixture
def urgent(slurm: Slurm) -> Iterator[list[str]]:
    """Options of a job that preempts others. They get TERM, and minutes to end."""
    slurm.run("scontrol", "create", "partitionname=urgent", "nodes=ALL", "prioritytier=2")
    slurm.run("scontrol", "update", "partitionname=gpu", "gracetime=150")
    yield ["--partition=urgent", "--exclusive", f"--nodes={len(slurm.nodes)}"]
    slurm.run("scontrol", "update", "partitionname=gpu", "gracetime=0")
    slurm.wait_until_idle()
    slurm.run("scontrol", "delete", "partitionname=urgent")


@pytest.mark.torch
def test_training_goes_on_after_its_time_limit_and_after_a_preemption(
    slurm: Slurm, launcher: Launcher, write_job: WriteJob, urgent: list[str], tmp_path: Path
) -> None:
    """Its losses are those of one process that nothing interrupts."""
    options = [*GPT, "--data", str(corpus(tmp_path)), "--steps", str(STEPS)]
    written = slurm.shared / "then.json"
    saved = ["--checkpoint", str(slurm.shared / "saved"), "--losses", str(written)]
    file = write_job(
        "",
        cluster={
            "slurm": {"time": "20m"},
            "nodes": 2,
            "slots": 1,
            "gpus": 0,
            "python": sys.executable,
        },
        framework="torch",
        strategy="ddp",
        script=str(job("interrupted.py")),
        args=["train_gpt", *options, *saved],
        env={"WAIT_AT": ",".join(map(str, WAIT_AT)), **IDLE},
        training={"global_batch": BATCH},
        restart={"max": 2},
        grace="2m",
    )
    launch = launcher.start(file, env=slurm.environment)
    launch.until("] waits\n", count=2)
    (run,) = (launcher.home / "runs").iterdir()
    number = json.loads((run / "run.json").read_text())["job_id"]
    # Slurm sends the signal three minutes before the limit: `grace` and one minute. It looks at
    # limits every half a minute.
    limit = (slurm.seconds(number) + 180) // 60
    slurm.run("scontrol", "update", f"jobid={number}", f"timelimit={limit}")
    launch.until("reached its time limit")
    launch.until("is queued again (restart 1)")
    slurm.start_again(number, "timelimit=20")
    launch.until("] waits\n", count=4)
    other = slurm.submit("#!/bin/sh\nexit\n", *urgent)
    launch.until("preempted by another job; ")
    slurm.wait(other)
    slurm.start_again(number)
    done = launch.wait()
    assert done.code == 0, str(done)
    assert [f"resumed after step {step}" in done.stdout for step in WAIT_AT] == [True, True]
    in_one_go = alone("train_gpt.py", tmp_path, [*options, "--batch", str(BATCH)])
    assert losses(written) == pytest.approx(in_one_go[WAIT_AT[-1] :], rel=1e-4)
