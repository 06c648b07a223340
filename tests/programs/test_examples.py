"""The job files of the page `examples` run unchanged, on 2 hosts.

Only the hosts differ, and the settings for programs without a GPU.
"""

from __future__ import annotations

import re
import signal
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster import Cluster
from support.cluster import Launcher

pytestmark = [pytest.mark.programs, pytest.mark.netns, pytest.mark.torch]

JOBS = Path(__file__).with_name("jobs")
PAGE = Path(__file__).parents[2] / "cli" / "dtrain_cli" / "help" / "examples.md"
BLOCKS = re.findall(r"^```yaml\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
MOST_LINES = 9
MOST_BARS = 4
JobFile = Callable[..., Path]
OFFLINE = {"HF_HUB_OFFLINE": "1", "UV_OFFLINE": "1"}


@dataclass(frozen=True)
class Program:
    """What a test adds to an example, and what the example then shows."""

    marker: str
    """Text that only this program's job file has."""
    env: dict[str, str] = field(default_factory=dict)
    args: tuple[str, ...] = ()
    slots: int = 1
    """Workers on each host. Most of a test's time is the import of frameworks in each."""
    ranks: int = 0
    """How many train, if not all workers."""
    times: int = 0
    """How many say so, if not each rank."""
    fails: str = "rank 1"
    """The worker that this test makes fail."""
    named: str = "rank 1 on node2"
    """The process of dtrain that the report then names."""


PROGRAMS = {
    "trainer": Program("trainer.py"),
    "accelerate": Program("accelerated.py", args=("--cpu",), slots=2, fails="rank 3"),
    "lightning": Program("lit.py"),
    "fabric": Program("fabric.py"),
    "deepspeed": Program("zero.py", {"DS_ACCELERATOR": "cpu"}),
    "gpt": Program("script: gpt.py"),
    # The exception of a remote call ends its caller.
    "rpc": Program("rpc.py", times=1, named="rank 0 on node1"),
    "jax": Program("jax_sum.py", {"JAX_PLATFORMS": "cpu"}),
    "keras": Program("keras_workers.py", fails="worker 1", named="worker1 on node2"),
    "coordinator": Program(
        "coordinator.py",
        slots=2,
        ranks=2,
        times=1,
        fails="chief 0",
        named="chief0 on node1",
    ),
    "make": Program("make,"),
    "uv": Program("uv,", {"PYTHONPATH": sysconfig.get_path("purelib")}),
}
COUNT_LOCAL_RANKS = {"lightning", "gpt", "jax"}
"""Train with two workers on each host. The others of torch read the same variables as these."""
FAIL_AS_SCRIPTS_DO = {"gpt", "trainer", "fabric", "deepspeed"}
"""Their exceptions end the one Python process of a rank, and nothing catches them before: see
`tests/launch/test_end.py`."""


def example(program: Program) -> str:
    (text,) = (block for block in BLOCKS if program.marker in block)
    return text


def test_every_example_is_run() -> None:
    cluster, *examples = BLOCKS
    assert sorted(map(example, PROGRAMS.values())) == sorted(examples)
    for text in examples:
        assert len((cluster + text).splitlines()) <= MOST_LINES


@pytest.fixture
def job_file(cluster: Cluster, launcher: Launcher, python: str) -> JobFile:
    def write(program: Program, slots: int, **env: str) -> Path:
        job: dict[str, Any] = yaml.safe_load(example(program))["job"]
        job["env"] = {**OFFLINE, **job.get("env", {}), **program.env, **env}
        job["args"] = [*job.get("args", ()), *program.args]
        job["sync"] = {"source": str(JOBS)}
        return launcher.file(cluster, job, slots=slots, python=python)

    return write


@pytest.mark.parametrize("name", PROGRAMS)
def test_trains(cluster: Cluster, launcher: Launcher, job_file: JobFile, name: str) -> None:
    program = PROGRAMS[name]
    slots = 2 if name in COUNT_LOCAL_RANKS else program.slots
    done = launcher.run(job_file(program, slots))
    assert done.code == 0, str(done)
    ranks = program.ranks or 2 * slots
    said = done.stdout.count(f"trained 4 steps on {ranks} ranks")
    assert said == (program.times or ranks), str(done)
    assert "no worker ever connected" not in done.stderr
    # A log in a pipe has no cursor movements, and no line for each refresh of a bar.
    log = done.stdout + done.stderr
    assert not set(log) & set("\r\x1b"), str(done)
    assert log.count("%|") <= MOST_BARS, str(done)
    assert launcher.left(cluster) == {}


@pytest.mark.parametrize("name", sorted(PROGRAMS.keys() - FAIL_AS_SCRIPTS_DO))
def test_names_the_worker_that_failed(
    cluster: Cluster, launcher: Launcher, job_file: JobFile, name: str
) -> None:
    program = PROGRAMS[name]
    # `test_trains` checks the hosts, where the framework is imported once more.
    file = job_file(program, program.slots, PLANTED=program.fails)
    done = launcher.run(file, "--no-check")
    assert done.code == 1, str(done)
    report = done.stderr.partition("\nerror: ")[2]
    assert report.startswith(program.named), str(done)
    assert f"    ValueError: record 2 of {program.fails} is bad\n" in report, str(done)
    assert launcher.left(cluster) == {}


@pytest.mark.parametrize("name", ["accelerate", "make"])
def test_an_interrupt_leaves_nothing(
    cluster: Cluster, launcher: Launcher, job_file: JobFile, name: str
) -> None:
    """Where the process that dtrain starts is not the one that trains."""
    launch = launcher.start(job_file(PROGRAMS[name], 1, PLANTED="a wait"), "--no-check")
    launch.until("waits at record 2", count=2)
    launch.send(signal.SIGINT)
    done = launch.wait()
    assert done.code == 130, str(done)
    assert launcher.left(cluster) == {}
