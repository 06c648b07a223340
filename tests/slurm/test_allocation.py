"""`dtrain launch` inside an allocation that the user has."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator, Mapping

import pytest

from support.cluster import Launcher
from support.slurm import GPUS, Slurm, WriteJob

pytestmark = [pytest.mark.slurm, pytest.mark.netns]


@pytest.fixture
def allocation(slurm: Slurm) -> Iterator[Mapping[str, str]]:
    """The environment of a shell inside an allocation of two nodes."""
    file = slurm.shared / "environment"
    file.unlink(missing_ok=True)
    shell = f"env -0 >{file}.new && mv {file}.new {file} && cat"
    # The shell ends with its stdin.
    with subprocess.Popen(
        ["salloc", "--nodes=2", f"--gpus-per-node={GPUS}", "sh", "-c", shell],
        env={**os.environ, **slurm.environment},
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ):
        slurm.wait_for("an allocation", file.exists)
        pairs = (pair.split("=", 1) for pair in file.read_text().split("\0")[:-1])
        yield {name: value for name, value in pairs if name.startswith("SLURM")}


def test_a_launch_runs_in_the_allocation(
    slurm: Slurm, launcher: Launcher, write_job: WriteJob, allocation: Mapping[str, str]
) -> None:
    program = """\
import os, time
names = ["SLURM_JOB_ID", "DTRAIN_ATTEMPT", "CUDA_VISIBLE_DEVICES"]
print(*(os.environ[name] for name in names), flush=True)
if os.environ["DTRAIN_ATTEMPT"] == "1":
    if os.environ["RANK"] == "3":
        raise ValueError("bad batch")
    time.sleep(500)
"""
    # A login node is not needed: this machine has the allocation.
    file = write_job(program, slurm={"login": "nowhere.invalid"}, restart={"max": 1})
    done = launcher.run(file, env=allocation)
    assert done.code == 0, str(done)
    job = allocation["SLURM_JOB_ID"]
    again = f"rank 3 on {slurm.nodes[1].name} exited with status 1; job {job} starts again"
    assert again in done.stderr
    assert f"3] {job} 1 0,1\n" in done.stdout  # the others may end before they print
    assert done.stdout.count(f"] {job} 2 0,1\n") == 4, str(done)
    assert slurm.run("squeue", "--noheader", "--format=%i") == job


def test_a_service_that_fails_starts_the_job_again(
    slurm: Slurm, launcher: Launcher, write_job: WriteJob, allocation: Mapping[str, str]
) -> None:
    """The driver ends with status 0 on TERM. Another service has ended with status 0 before."""
    program = """\
import os, signal, sys, time
rank = os.environ["RANK"]
signal.signal(signal.SIGTERM, lambda *_: sys.exit())
if rank == "2":
    sys.exit()
if os.environ["DTRAIN_ATTEMPT"] == "1":
    time.sleep(2)
    if rank == "3":
        raise ValueError("bad batch")
    time.sleep(500)
if rank == "3":
    time.sleep(500)
time.sleep(3)
"""
    file = write_job(program, success_policy="first_host", restart={"max": 1})
    done = launcher.run(file, env=allocation)
    assert done.code == 0, str(done)
    first, second = (node.name for node in slurm.nodes[:2])
    assert f"rank 3 on {second} exited with status 1; job " in done.stderr
    assert "starts again (restart 1)" in done.stderr
    assert f"2 workers on {first}, the first host, finished" in done.stderr
    slurm.wait_for("the watchers' end", lambda: "watch" not in steps(slurm))


def test_a_job_that_hangs_starts_again(
    slurm: Slurm, launcher: Launcher, write_job: WriteJob, allocation: Mapping[str, str]
) -> None:
    program = """\
import os, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
if os.environ["DTRAIN_ATTEMPT"] == "1":
    signal.pause()
"""
    watchdog = {"silence": "15s", "then": "restart"}
    file = write_job(program, watchdog=watchdog, restart={"max": 1})
    done = launcher.run(file, env=allocation)
    assert done.code == 0, str(done)
    hung = "no output and no progress from any worker for 15 s; job"
    assert f"{hung} {allocation['SLURM_JOB_ID']} starts again (restart 1)" in done.stderr
    slurm.wait_for("the watchers' end", lambda: "watch" not in steps(slurm))


def steps(slurm: Slurm) -> str:
    return slurm.run("squeue", "--noheader", "--steps", "--format=%j")


@pytest.mark.parametrize("command", ["launch", "stop"])
def test_a_stop_ends_the_step_alone(
    slurm: Slurm,
    launcher: Launcher,
    write_job: WriteJob,
    allocation: Mapping[str, str],
    command: str,
) -> None:
    program = """\
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit("saved"))
print("up", flush=True)
signal.pause()
"""
    launch = launcher.start(write_job(program), env=allocation)
    launch.until("] up", count=4)
    (run,) = (launcher.home / "runs").iterdir()
    if command == "launch":
        where = launcher.command("stacks", run.name, env=slurm.environment).wait()
        place = r"ranks 0-3 on .*: in <module> \(.*\.py:4\)\n"
        assert re.fullmatch(place, where.stdout), str(where)
        launch.process.send_signal(signal.SIGINT)
    else:
        launch.kill()
        attached = launcher.command("attach", run.name, env=slurm.environment)
        attached.until("4 workers on 2 hosts")
        attached.process.send_signal(signal.SIGINT)
        assert attached.wait().code == 130
        launch = launcher.command("stop", run.name, env=slurm.environment)
    done = launch.wait()
    assert done.code == (130 if command == "launch" else 0), str(done)
    assert [path.read_text() for path in run.rglob("*.err")] == ["saved\n"] * 4
    job = allocation["SLURM_JOB_ID"]
    assert f"the step in job {job} is stopped; nothing of it runs" in done.stderr
    assert slurm.state(job) == "RUNNING"
    assert "dtrain" not in steps(slurm)


def test_an_allocation_of_another_size(
    launcher: Launcher, write_job: WriteJob, allocation: Mapping[str, str]
) -> None:
    done = launcher.run(write_job("", cluster={"slurm": {}, "nodes": 3, "gpus": 2}), env=allocation)
    assert done.code == 3, str(done)
    assert "the allocation has 2 machines, and the job needs 3" in done.stderr
    assert "hint: set 'nodes: 2', or use `salloc --nodes=3`" in done.stderr
