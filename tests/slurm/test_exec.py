"""`dtrain exec` on a run that Slurm started: each command is a step of the job."""

from __future__ import annotations

import signal

import pytest

from support.cluster import Launcher
from support.limits import until
from support.slurm import Slurm, WriteJob

pytestmark = [pytest.mark.slurm, pytest.mark.netns]
WAIT = "import os, time\nprint('up', flush=True)\ntime.sleep(500)\n"


def sleeping_on(slurm: Slurm) -> list[str]:
    return [text for host in slurm.nodes for text in host.processes().values() if "987" in text]


def test_a_step_on_each_node_of_the_job(
    slurm: Slurm, launcher: Launcher, write_job: WriteJob
) -> None:
    file = write_job(WAIT)
    refused = launcher.command("exec", str(file), "--", "true").wait()
    assert refused.code == 2
    assert "Slurm chooses its hosts when the job starts" in refused.stderr
    launch = launcher.start(file, env=slurm.environment)
    launch.until("] up", count=4)
    (run,) = (launcher.home / "runs").iterdir()
    command = ("exec", run.name, "--no-fold", "--")
    line = f"hostname; test $(hostname) != {slurm.nodes[0].name} || exit 3"
    done = launcher.command(*command, line, env=slurm.environment).wait()
    first, second = (host.name for host in slurm.nodes[:2])
    assert done.code == 1, str(done)
    assert sorted(done.stdout.splitlines()) == [f"[{name}] {name}" for name in (first, second)]
    assert f"error: {first}: exited with status 3\n" in done.stderr
    sleeping = launcher.command(*command, "echo ready; exec sleep 987", env=slurm.environment)
    sleeping.until("ready", count=2)
    sleeping.send(signal.SIGINT)
    assert sleeping.wait().code == 130
    until(lambda: not sleeping_on(slurm), "the end of the steps")
    launch.send(signal.SIGINT)
    assert launch.wait().code == 130
