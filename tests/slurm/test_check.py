"""`dtrain check`, `init` and `plan` on a real Slurm."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from support.cluster import Launcher
from support.limits import until
from support.slurm import GPUS, Slurm, WriteJob, config_for_login

pytestmark = [pytest.mark.slurm, pytest.mark.netns]

Check = Callable[..., dict[str, Any]]


@pytest.fixture
def check(slurm: Slurm, launcher: Launcher, write_job: WriteJob) -> Check:
    """Checks a job, and returns the JSON. ``request`` are keys of `cluster.slurm`, and ``own`` keys
    of `cluster`."""

    def run(
        code: int,
        request: dict[str, Any] | None = None,
        own: dict[str, Any] | None = None,
        **job: Any,
    ) -> dict[str, Any]:
        cluster = {"slurm": request or {}, "nodes": 2, "gpus": GPUS, "python": sys.executable}
        path = write_job("", cluster={**cluster, **(own or {})}, **job)
        done = launcher.command("check", str(path), "--json", env=slurm.environment).wait()
        assert done.code == code, str(done)
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    return run


def test_a_good_file_has_no_finding(slurm: Slurm, check: Check, launcher: Launcher) -> None:
    found = check(0)
    assert found["findings"] == []
    nodes = [host["host"] for host in found["hosts"]]
    assert nodes == [host.name for host in slurm.nodes[:2]]
    for host in found["hosts"]:
        assert host["facts"]["granted"] == {"count": GPUS, "devices": ["0", "1"]}
        assert host["facts"]["interpreter"]["executable"] == sys.executable
    # It leaves no file.
    assert not list((launcher.folder / ".dtrain").glob("check-*"))


@pytest.mark.parametrize(
    ("request_", "own", "key", "seen"),
    [
        ({"partition": "gpus"}, {}, "slurm.partition", "no partition gpus; do you mean gpu?"),
        ({}, {"gpus": 9}, "gpus", "0 of 4 machines of partition gpu have 9 GPUs"),
        ({"gpu_type": "h100"}, {}, "slurm.gpu_type", "GPUs of type h100; there are a100"),
        ({"reservation": "no"}, {}, "slurm.reservation", "Requested reservation is invalid"),
        ({"options": ["--mem=99T"]}, {}, "slurm.options", "configuration is not available"),
    ],
)
def test_a_request_that_cannot_start_is_found_at_its_line(
    check: Check,
    launcher: Launcher,
    request_: dict[str, Any],
    own: dict[str, Any],
    key: str,
    seen: str,
) -> None:
    found = check(3, request_, own)
    assert found["hosts"] == []
    (finding,) = found["findings"]
    assert (finding["severity"], finding["subject"]) == ("error", f"cluster.{key}")
    assert seen in finding["seen"]
    file, line, column = finding["place"].split(":")
    text = (launcher.folder / file).read_text().splitlines()[int(line) - 1]
    assert text[int(column) - 1 :].startswith(f"{key.rpartition('.')[2]}:")


def test_an_account_that_the_partition_does_not_accept(slurm: Slurm, check: Check) -> None:
    slurm.run("scontrol", "update", "partitionname=gpu", "denyaccounts=nope")
    try:
        (finding,) = check(3, {"account": "nope"})["findings"]
    finally:
        slurm.run("scontrol", "update", "partitionname=gpu", "denyaccounts=")
    assert finding["subject"] == "cluster.slurm.account"
    assert finding["expected"] == "an account that is not denied"


def test_a_partition_that_is_down(slurm: Slurm, check: Check) -> None:
    slurm.run("scontrol", "update", "partitionname=gpu", "state=down")
    try:
        (finding,) = check(3)["findings"]
    finally:
        slurm.run("scontrol", "update", "partitionname=gpu", "state=up")
    assert finding["seen"] == "partition gpu is DOWN"


def test_every_machine_is_looked_at(slurm: Slurm, check: Check) -> None:
    """A Python that does not exist, a folder that only one machine has, a script that is missing,
    all at once."""
    own = {"python": "/no/such/python", "run_dir": "/dev/shm/dtrain-check"}
    found = check(3, own=own, script="absent.py")["findings"]
    nodes = [host.name for host in slurm.nodes[:2]]
    seen = {finding["subject"]: finding["seen"] for finding in found}
    assert {tuple(finding["hosts"]) for finding in found} == {tuple(nodes)}
    assert sorted(seen) == ["cluster.run_dir", "python", "script"]
    assert seen["cluster.run_dir"].endswith("is not there: no such file or directory")
    assert "/no/such/python does not run" in seen["python"]


def test_busy_machines_are_a_warning(slurm: Slurm, check: Check) -> None:
    job = slurm.submit("#!/bin/sh\nsleep 500\n", f"--nodes={len(slurm.nodes)}", "--exclusive")
    slurm.wait(job, "RUNNING")
    (finding,) = check(0)["findings"]
    assert (finding["severity"], finding["subject"]) == ("warning", "machines")
    assert "not checked" in finding["seen"]


def test_inside_an_allocation(slurm: Slurm, launcher: Launcher, write_job: WriteJob) -> None:
    """The allocation has all GPUs, and no other machine is free."""
    options = ("--nodes=2", f"--gpus-per-node={GPUS}", "--exclusive")
    job = slurm.submit("#!/bin/sh\nsleep 500\n", *options)
    rest = slurm.submit("#!/bin/sh\nsleep 500\n", "--nodes=2", "--exclusive")
    slurm.wait(job, "RUNNING")
    slurm.wait(rest, "RUNNING")
    path = write_job("")
    env = {**slurm.environment, "SLURM_JOB_ID": job}
    done = launcher.command("check", str(path), env=env).wait()
    assert done.code == 0, str(done)
    assert "2 hosts checked" in done.stdout
    path.write_text(path.read_text().replace("nodes: 2", "nodes: 3"))
    done = launcher.command("check", str(path), env=env).wait()
    assert done.code == 3, str(done)
    assert "the allocation has 2 machines, and the job needs 3" in done.stdout


def test_an_interrupt_ends_the_step(slurm: Slurm, launcher: Launcher, write_job: WriteJob) -> None:
    python = launcher.folder / "python"
    python.write_text("#!/bin/sh\nsleep 500\n")
    python.chmod(0o755)
    cluster = {"slurm": {}, "nodes": 2, "gpus": GPUS, "python": str(python)}
    file = write_job("", cluster=cluster)
    check = launcher.command("check", str(file), env=slurm.environment)
    until(lambda: slurm.states() != {"idle": len(slurm.nodes)}, "the step")
    check.send(signal.SIGINT)
    assert check.wait().code == 130
    until(lambda: slurm.run("squeue", "--noheader") == "", "the end of the step")


def test_an_interrupt_ends_a_command_that_waits_on_the_login_node(
    slurm: Slurm, launcher: Launcher, write_job: WriteJob
) -> None:
    """As one without a configuration does."""
    config_for_login(slurm, launcher)
    sinfo = slurm.login.home / "bin" / "sinfo"
    sinfo.parent.mkdir(exist_ok=True)
    sinfo.write_text("#!/bin/sh\nexec sleep 501\n")
    sinfo.chmod(0o755)
    bashrc = slurm.login.home / ".bashrc"
    bashrc.write_text("PATH=~/bin:$PATH\n")
    waits = lambda: "sleep 501" in slurm.login.processes().values()  # noqa: E731
    check = launcher.command("check", str(write_job("", slurm={"login": "login01"})))
    until(waits, "sinfo")
    check.send(signal.SIGINT)
    assert check.wait().code == 130
    until(lambda: not waits(), "the end of sinfo")
    sinfo.unlink()
    bashrc.unlink()


def test_no_slurm_here(launcher: Launcher, write_job: WriteJob) -> None:
    env = {"PATH": "/no/such/folder"}
    done = launcher.command("check", str(write_job("")), env=env).wait()
    assert done.code == 3, str(done)
    assert "sbatch: not found" in done.stdout


TORCH = """\
from types import SimpleNamespace
__version__ = "2.13.0"
cuda = SimpleNamespace(
    device_count=lambda: 2,
    is_available=lambda: True,
    get_arch_list=lambda: [],
    get_device_capability=lambda _: (9, 4),
)
distributed = SimpleNamespace(is_available=lambda: True, is_nccl_available=lambda: False)
version = SimpleNamespace(__version__=__version__, cuda=None, hip="6.4")
"""


@pytest.mark.sshd
@pytest.mark.parametrize("where", ["here", "over SSH"])
def test_a_first_file_passes_its_check(slurm: Slurm, launcher: Launcher, where: str) -> None:
    env, home = slurm.environment, launcher.folder
    options = ["--framework", "torch", "--script", "train.py"]
    if where == "over SSH":
        config_for_login(slurm, launcher)
        env, home = {}, slurm.login.home
        options += ["--login", "login01"]
    (home / "train.py").touch()
    (home / "torch.py").write_text(TORCH)

    def run(*argv: str) -> str:
        done = launcher.command(*argv, env=env).wait()
        assert done.code == 0, str(done)
        return done.stdout

    run("init", "first.yaml", *options)
    cluster = yaml.safe_load((launcher.folder / "first.yaml").read_text())["cluster"]
    login = {"login": "login01"} if where == "over SSH" else {}
    assert cluster == {
        "slurm": {"partition": "gpu", "time": "1h", "cpus": 8, **login},
        "nodes": 2,
        "gpus": GPUS,
        "gpu": "a100-80gb",
    }
    assert "--gpus-per-node=2" in run("launch", "first.yaml", "--dry-run")
    assert "2 hosts checked" in (checked := run("check", "first.yaml"))
    assert "no problems found" in checked
    text = (launcher.folder / "first.yaml").read_text()
    (launcher.folder / "first.yaml").write_text(text.replace("  gpu: a100-80gb", "  #"))
    found = json.loads(run("plan", "first.yaml", "--model-size", "1B", "--json"))
    assert (found["cluster"]["gpus"], found["cluster"]["gpu"]) == (4, "a100-80gb")
