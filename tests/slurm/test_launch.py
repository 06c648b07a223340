"""`dtrain launch` on a Slurm: output, ends and failures."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.cluster import Launcher
from support.slurm import Slurm

pytestmark = [pytest.mark.slurm, pytest.mark.netns]

Job = Callable[..., Path]


@pytest.fixture
def job(slurm: Slurm, launcher: Launcher) -> Job:
    """Writes a cluster file for a Python program, with two workers on each of two nodes."""

    def write(program: str, *, engine: Mapping[str, Any] | None = None, **keys: Any) -> Path:
        script = launcher.folder / "program.py"
        script.write_text(program)
        cluster = {"slurm": dict(engine or {}), "nodes": 2, "gpus": 2, "python": sys.executable}
        cluster |= keys.pop("cluster", {})
        text = {
            "name": "test",
            "cluster": cluster,
            "job": {"framework": "none", "script": str(script), **keys},
        }
        path = launcher.folder / "cluster.yaml"
        path.write_text(yaml.safe_dump(text, sort_keys=False))
        return path

    return write


def test_output_arrives_byte_exact(slurm: Slurm, launcher: Launcher, job: Job) -> None:
    program = """\
import os, sys
rank = os.environ["RANK"]
print("rank", rank, "of", os.environ["WORLD_SIZE"], "sees", os.environ["CUDA_VISIBLE_DEVICES"])
sys.stdout.flush()
sys.stdout.buffer.write(bytes(range(256)) * 4000)
"""
    done = launcher.run(job(program), env=slurm.environment)
    assert done.code == 0, str(done)
    assert "all 4 workers finished" in done.stderr
    nodes = [host.name for host in slurm.nodes[:2]]
    for rank in range(4):
        node = nodes[rank // 2]
        assert f"[{node} {rank}] rank {rank} of 4 sees " in done.stdout
        assert launcher.log(node, f"worker-{rank}.out").endswith(bytes(range(256)) * 4000)


WAIT = """\
import os, sys, time
print("up", flush=True)
time.sleep(500)
"""
FAIL = """\
import os, time
if os.environ["RANK"] == "2":
    raise ValueError("bad batch")
time.sleep(500)
"""


def test_the_first_failure_is_named_with_its_traceback(
    slurm: Slurm, launcher: Launcher, job: Job
) -> None:
    done = launcher.run(job(FAIL), env=slurm.environment)
    assert done.code == 1, str(done)
    assert f"error: rank 2 on {slurm.nodes[1].name} exited with status 1" in done.stderr
    report = done.stderr.partition("error: rank 2")[2]
    assert "ValueError: bad batch" in report and "program.py" in report


def test_what_fails_before_the_program_starts_is_shown(
    slurm: Slurm, launcher: Launcher, job: Job
) -> None:
    done = launcher.run(job("", setup=["cd /no/such/folder"]), env=slurm.environment)
    assert done.code == 1, str(done)
    report = done.stderr.partition("error: rank 0")[2]
    assert "cd: /no/such/folder: No such file or directory" in report


def test_a_refused_job_is_reported_with_the_words_of_sbatch(
    slurm: Slurm, launcher: Launcher, job: Job
) -> None:
    done = launcher.run(job("", engine={"partition": "nope"}), env=slurm.environment)
    assert done.code == 3, str(done)
    assert "this machine: submitting the job: sbatch --parsable" in done.stderr
    assert "sbatch: error: invalid partition specified: nope" in done.stderr
    assert "hint: `sinfo` lists the partitions" in done.stderr


def test_ctrl_c_cancels_the_job_and_confirms(slurm: Slurm, launcher: Launcher, job: Job) -> None:
    launch = launcher.start(job(WAIT), env=slurm.environment)
    launch.until("] up", count=4)
    launch.process.send_signal(signal.SIGINT)
    done = launch.wait()
    assert done.code == 130, str(done)
    assert "is cancelled; nothing of it runs" in done.stderr
    assert slurm.run("squeue", "--noheader") == ""


def test_a_queued_job_says_why_and_can_be_cancelled(
    slurm: Slurm, launcher: Launcher, job: Job
) -> None:
    first = slurm.submit("#!/bin/sh\nsleep 500\n", f"--nodes={len(slurm.nodes)}", "--exclusive")
    slurm.wait(first, "RUNNING")
    launch = launcher.start(job(WAIT), env=slurm.environment)
    launch.until("is queued: waiting for free machines (Resources)")
    (run,) = json.loads(launcher.command("ps", "--json").wait().stdout)["runs"]
    assert (run["state"], run["hosts_known"]) == ("queued", False)
    launch.process.send_signal(signal.SIGINT)
    assert launch.wait().code == 130


def test_cancelled_from_outside(slurm: Slurm, launcher: Launcher, job: Job) -> None:
    launch = launcher.start(job(WAIT), env=slurm.environment)
    launch.until("] up", count=4)
    slurm.run("scancel", "--user=root")
    done = launch.wait()
    assert done.code == 1, str(done)
    assert "was cancelled outside dtrain" in done.stderr


def test_a_node_fails(slurm: Slurm, launcher: Launcher, job: Job) -> None:
    launch = launcher.start(job(WAIT), env=slurm.environment)
    launch.until("] up", count=4)
    lost = slurm.nodes[1]
    slurm.fail_node(lost)
    done = launch.wait()
    assert done.code == 3, str(done)
    assert f"error: {lost.name} failed" in done.stderr


def test_the_job_runs_out_of_memory(slurm: Slurm, launcher: Launcher, job: Job) -> None:
    program = "import os, time\nx = bytearray(10**9) if os.environ['RANK'] == '1' else 0\n"
    file = job(program + "time.sleep(500)", engine={"options": ["--mem=300"]})
    done = launcher.run(file, env=slurm.environment)
    assert done.code == 1, str(done)
    assert f"on {slurm.nodes[0].name} was killed: the host ran out of memory" in done.stderr
    assert "cluster.slurm.options: ['--mem=0']" in done.stderr


def test_the_time_limit(slurm: Slurm, launcher: Launcher, job: Job) -> None:
    # With such a limit, the warning comes as soon as Slurm looks at the job.
    file = job(WAIT, engine={"time": "1m"}, grace="55s")
    done = launcher.run(file, env=slurm.environment)
    assert done.code == 1, str(done)
    assert "reached its time limit of 00:01:00" in done.stderr
    assert "hint: set a longer cluster.slurm.time" in done.stderr


def test_a_detached_run_is_followed_by_other_commands(
    slurm: Slurm, launcher: Launcher, job: Job
) -> None:
    done = launcher.run(job(WAIT), "--detach", env=slurm.environment)
    assert done.code == 0, str(done)
    run = done.stdout.strip()
    logs = launcher.command("logs", "--follow", run)
    logs.until("] up", count=4)
    attached = launcher.command("attach", run)
    attached.until("4 workers on 2 hosts")
    assert launcher.command("stop", run).wait().code == 0
    assert attached.wait().code == 130
    assert logs.wait().code == 0
    assert slurm.run("squeue", "--noheader") == ""


def test_another_process_takes_over_a_job_of_a_killed_launcher(
    slurm: Slurm, launcher: Launcher, job: Job
) -> None:
    program = (
        "import time\nfor step in range(60):\n    print(step, flush=True)\n    time.sleep(.1)\n"
    )
    launch = launcher.start(job(program), env=slurm.environment)
    launch.until("0] 1\n")
    launch.kill()
    (run,) = (launcher.home / "runs").iterdir()
    shown = launcher.command("ps", run.name, env=slurm.environment).wait().stdout
    assert "unattended" in shown and "running" in shown
    done = launcher.command("attach", run.name, env=slurm.environment).wait()
    assert done.code == 0, str(done)
    expected = "".join(f"{step}\n" for step in range(60)).encode()
    for rank in range(4):
        assert launcher.log(slurm.nodes[rank // 2].name, f"worker-{rank}.out") == expected


def test_a_job_that_slurm_has_forgotten(slurm: Slurm, launcher: Launcher, job: Job) -> None:
    launch = launcher.start(job("print('up', flush=True)\n"), env=slurm.environment)
    launch.until("is submitted")
    launch.kill()
    (run,) = (launcher.home / "runs").iterdir()
    number = json.loads((run / "run.json").read_text())["job_id"]
    slurm.wait(number)
    slurm.forget()
    shown = launcher.command("ps", run.name, env=slurm.environment).wait()
    assert "gone" in shown.stdout, str(shown)
    done = launcher.command("attach", run.name, env=slurm.environment).wait()
    assert done.code == 3, str(done)
    assert f"Slurm no longer knows job {number}" in done.stderr
    assert done.stdout.count("] up") == 4


def test_a_login_node_over_ssh(slurm: Slurm, launcher: Launcher, job: Job) -> None:
    login = slurm.cluster.section()["ssh"]
    (launcher.folder / ".ssh").mkdir()
    lines = [
        "Host login01",
        f"HostName {slurm.login.address}",
        f"User {login['user']}",
        f"IdentityFile {login['identity']}",
        f"UserKnownHostsFile {login['known_hosts']}",
    ]
    (launcher.folder / ".ssh" / "config").write_text("\n  ".join(lines) + "\n")
    done = launcher.run(job("print('up')", engine={"login": "login01"}))
    assert done.code == 0, str(done)
    assert done.stdout.count("] up") == 4
    assert slurm.run("squeue", "--noheader") == ""
