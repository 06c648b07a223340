"""What sites and users set up for Slurm's commands, and what a job must not depend on."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator

import pytest

from dtrain.engines.slurm.partitions import MACHINES, PARTITIONS, read
from dtrain.engines.slurm.script import render
from dtrain.launchplan.build import build
from dtrain.node.slurm.commands import BatchJob
from dtrain.spec.load import parse
from support.cluster import Launcher
from support.limits import until
from support.other_users import MALLORY, acting_as
from support.slurm import Slurm, WriteJob

pytestmark = [pytest.mark.slurm, pytest.mark.netns]

VARIABLES = {
    "MINE": "up",
    "SBATCH_PARTITION": "nope",
    "SBATCH_EXPORT": "NONE",
    "SBATCH_ARRAY_INX": "0-1",
    "SBATCH_ERROR": "elsewhere",
    "SLURM_MEM_PER_CPU": "100",
    "SLURM_MEM_PER_NODE": "100",
    "SCANCEL_STATE": "PENDING",
    "SCANCEL_INTERACTIVE": "true",
    "SQUEUE_PARTITION": "nope",
    "SINFO_PARTITION": "nope",
}
PROGRAM = """\
import os, signal, sys, time
def save(*_):
    print("saved", flush=True)
    sys.exit(1)
signal.signal(signal.SIGTERM, save)
print(os.environ["MINE"], flush=True)
time.sleep(500)
"""


def test_variables_of_the_user_do_not_change_a_job(
    slurm: Slurm, launcher: Launcher, write_job: WriteJob
) -> None:
    env = {**slurm.environment, **VARIABLES}
    file = write_job(PROGRAM, slurm={"partition": "gpu"})
    checked = launcher.command("check", str(file), "--json", env=env).wait()
    assert json.loads(checked.stdout)["findings"] == [], str(checked)
    launch = launcher.start(file, env=env)
    launch.until("] up", count=4)
    job = slurm.run("squeue", "--noheader", "--format=%i")
    # As Slurm does before the time limit.
    slurm.run("scancel", "--batch", "--signal=USR1", job)
    done = launch.wait()
    assert done.stdout.count("] saved") == 4, str(done)
    assert "reached its time limit" in done.stderr
    launch = launcher.start(file, env=env)
    launch.until("] up", count=4)
    launch.process.send_signal(signal.SIGINT)
    assert launch.wait().code == 130
    assert slurm.run("squeue", "--noheader") == ""


@pytest.fixture
def hidden(slurm: Slurm) -> Iterator[str]:
    """A partition that only administrators see without ``--all``."""
    slurm.run("scontrol", "create", "partitionname=own", "nodes=ALL", "hidden=yes")
    yield "own"
    slurm.wait_until_idle()
    slurm.run("scontrol", "delete", "partitionname=own")


def test_a_hidden_partition_is_as_good_as_others(
    slurm: Slurm, hidden: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_user = ("runuser", "-u", MALLORY.pw_name, "--")
    answers = [slurm.run(*as_user, *command) for command in (PARTITIONS, MACHINES)]
    (own,) = (one for one in read(*answers) if one.hidden)
    assert (own.name, len(own.machines)) == (hidden, len(slurm.nodes))

    cluster = f"{{slurm: {{partition: {hidden}}}, nodes: 1, gpus: 0, run_dir: {slurm.shared}/own}}"
    # TERM may reach the child before the shell.
    waits = "while :; do sleep 500 & wait; done"
    program = json.dumps(f"trap 'echo saved; exit 1' TERM; echo up; {waits}")
    job = f"{{framework: none, command: [bash, -c, {program}]}}"
    text = f"name: own\ncluster: {cluster}\njob: {job}\n"
    script = slurm.shared / "own.sbatch"
    script.write_text(render(build(parse(text, "job.yaml"))))
    slurm.run("install", "-d", "-m", "777", str(slurm.shared / "own"))
    number = slurm.run(*as_user, "sbatch", "--parsable", "--output=/dev/null", str(script))

    def output() -> str:
        files = slurm.shared.glob(f"own/nodes/own-{number}/*/*.out")
        return "".join(file.read_text() for file in files)

    until(lambda: output() == "up\n", "the program")

    monkeypatch.setenv("SLURM_CONF", slurm.environment["SLURM_CONF"])
    with acting_as(MALLORY):
        assert BatchJob("own", b"")._queued().text == number

    slurm.run(*as_user, "scancel", "--batch", "--signal=USR1", number)
    slurm.wait(number)
    assert output() == "up\nsaved\n"
