"""A job that Slurm interrupts goes on from its checkpoint."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.cluster import Launcher, job
from support.launching import Launch
from support.recipes import GPT, alone, corpus, losses
from support.slurm import Slurm, WriteJob

pytestmark = [pytest.mark.slurm, pytest.mark.netns]

STEPS, BATCH = 4, 12
WAIT_AT = 2


@pytest.fixture
def urgent(slurm: Slurm) -> Iterator[list[str]]:
    """Options of a job that preempts others. They get TERM, and minutes to end."""
    slurm.run("scontrol", "create", "partitionname=urgent", "nodes=ALL", "prioritytier=2")
    slurm.run("scontrol", "update", "partitionname=gpu", "gracetime=150")
    yield ["--partition=urgent", "--exclusive", f"--nodes={len(slurm.nodes)}"]
    slurm.run("scontrol", "update", "partitionname=gpu", "gracetime=0")
    slurm.wait_until_idle()
    slurm.run("scontrol", "delete", "partitionname=urgent")


def section(*args: str, waits: tuple[int, ...], **more: Any) -> dict[str, Any]:
    """A job of one rank on each of two nodes, which waits in its first attempts."""
    return {
        "cluster": {
            "slurm": {"time": "20m"},
            "nodes": 2,
            "slots": 1,
            "gpus": 0,
            "python": sys.executable,
        },
        "framework": "torch",
        "script": str(job("interrupted.py")),
        "args": list(args),
        "env": {"WAIT_AT": ",".join(map(str, waits)), "OMP_NUM_THREADS": "1"},
        "restart": {"max": len(waits)},
        "grace": "2m",
        **more,
    }


def number_of(launcher: Launcher) -> str:
    (run,) = (launcher.home / "runs").iterdir()
    return str(json.loads((run / "run.json").read_text())["job_id"])


def preempt(slurm: Slurm, number: str, launch: Launch, urgent: list[str]) -> None:
    """Preempt the job, and let it start again after the other one."""
    other = slurm.submit("#!/bin/sh\nexit\n", *urgent)
    launch.until("preempted by another job; ")
    slurm.wait(other)
    slurm.start_again(number)


@pytest.mark.torch
def test_training_goes_on_after_a_preemption(
    slurm: Slurm, launcher: Launcher, write_job: WriteJob, urgent: list[str], tmp_path: Path
) -> None:
    """Its losses are those of one process that nothing interrupts."""
    options = [*GPT, "--data", str(corpus(tmp_path)), "--steps", str(STEPS)]
    written = slurm.shared / "then.json"
    saved = ["--checkpoint", str(slurm.shared / "saved"), "--losses", str(written)]
    training = {"strategy": "ddp", "training": {"global_batch": BATCH}}
    job_ = section("train_gpt", *options, *saved, waits=(WAIT_AT,), **training)
    launch = launcher.start(write_job("", **job_), "--no-check", env=slurm.environment)
    launch.until("] waits\n", count=2)
    preempt(slurm, number_of(launcher), launch, urgent)
    done = launch.wait()
    assert done.code == 0, str(done)
    assert f"resumed after step {WAIT_AT}" in done.stdout
    in_one_go = alone("train_gpt.py", tmp_path, [*options, "--batch", str(BATCH)])
    assert losses(written) == pytest.approx(in_one_go[WAIT_AT:], rel=1e-4)


def test_a_job_goes_on_after_its_time_limit_and_after_a_preemption(
    slurm: Slurm, launcher: Launcher, write_job: WriteJob, urgent: list[str]
) -> None:
    saved = slurm.shared / "counted"
    saved.mkdir()
    job_ = section("counted", str(saved), waits=(2, 4))
    launch = launcher.start(write_job("", **job_), env=slurm.environment)
    launch.until("] waits\n", count=2)
    number = number_of(launcher)
    # Slurm sends the signal three minutes before the limit: `grace` and one minute. It looks at
    # limits every half a minute.
    limit = (slurm.seconds(number) + 180) // 60
    slurm.run("scontrol", "update", f"jobid={number}", f"timelimit={limit}")
    launch.until("reached its time limit")
    launch.until("is queued again (restart 1)")
    slurm.start_again(number, "timelimit=20")
    launch.until("] waits\n", count=4)
    preempt(slurm, number, launch, urgent)
    done = launch.wait()
    assert done.code == 0, str(done)
    for step in (2, 4):
        assert done.stdout.count(f"] resumed after step {step}\n") == 2, str(done)
