"""A real Slurm on hosts in network namespaces, with fake GPUs.

    from support.slurm import slurm
    __all__ = ["slurm"]

    def test_runs(slurm):
        job = slurm.sbatch("#!/bin/sh\nsrun hostname\n", "--nodes=2")
        assert slurm.state(job) == "COMPLETED"

The first host runs the controller and is the login node. The other hosts run jobs. This machine
reaches the controller too: a command with `Slurm.environment` submits from here. There is no
accounting, as on many clusters, so ``sacct`` answers with an error.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster import Cluster
from namespace_host import Host
from support.cluster import Launcher
from support.limits import HANG

NODES = 4
GPU, GPUS = "a100", 2
"""Fake GPUs of each node, and their type."""
FINAL = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")

_CONFIG = """\
ClusterName=test
SlurmctldHost={controller}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2,bf_interval=2
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
JobAcctGatherParams=OverMemoryKill
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=5
MinJobAge=3600
SlurmdTimeout=60
InactiveLimit=0
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
GresTypes=gpu
{nodes}
PartitionName=gpu Nodes=ALL Default=YES MaxTime=60 State=UP
"""
_CGROUP = """\
CgroupPlugin=cgroup/v1
CgroupMountpoint={folder}/cgroup
CgroupAutomount=no
"""


class Slurm:
    """A controller and nodes, running inside the ``with`` block."""

    def __init__(self, nodes: int = NODES) -> None:
        self.cluster = Cluster(nodes + 1)
        try:
            self.folder = self.cluster.folder / "slurm"
            self.shared = self.cluster.folder / "shared"
            """A folder that all hosts and this machine see under one path."""
            self.login, *self.nodes = self.cluster.hosts
            self._configure()
            self._start_munge()
            self.start_controller()
            for host in self.nodes:
                self.start_node(host)
            self._let_logins_in()
            self.wait_for("every node", lambda: self.states() == {"idle": nodes})
        except BaseException:
            self.cluster.close()
            raise

    def __enter__(self) -> Slurm:
        return self

    def __exit__(self, *_: object) -> None:
        self.cluster.close()

    @property
    def environment(self) -> dict[str, str]:
        """What a command on this machine needs to use this Slurm."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    @property
    def impatient(self) -> dict[str, str]:
        """As `environment`, for commands that wait 3 s for an answer of the controller, not 10."""
        return {"SLURM_CONF": str(self.folder / "impatient.conf")}

    def run(self, *argv: str, check: bool = True) -> str:
        """The stdout of a command on this machine."""
        done = subprocess.run(
            argv,
            env={**os.environ, **self.environment},
            cwd=self.shared,
            capture_output=True,
            text=True,
            timeout=HANG,
            check=False,
        )
        assert done.returncode == 0 or not check, f"{argv}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def sbatch(self, script: str, *options: str) -> str:
        """Submit a script, wait until the job is over, and return its id."""
        job = self.submit(script, *options)
        self.wait(job)
        return job

    def submit(self, script: str, *options: str) -> str:
        path = self.shared / f"job-{time.monotonic_ns()}.sbatch"
        path.write_text(script)
        return self.run("sbatch", "--parsable", *options, str(path))

    def job(self, job: str) -> dict[str, str]:
        """What the controller says about a job; empty if it does not know the job."""
        said = self.run("scontrol", "show", "job", "-o", job, check=False)
        return dict(re.findall(r"(\S+?)=(\S*)", said))

    def state(self, job: str) -> str:
        return self.job(job).get("JobState", "")

    def wait(self, job: str, *states: str) -> None:
        """Wait until a job is in one of ``states``; by default until it is over."""
        wanted = states or FINAL
        self.wait_for(f"job {job} to be {wanted}", lambda: self.state(job) in wanted)

    def start_again(self, job: str, *changes: str) -> None:
        """Start a job that is in the queue again. Slurm would wait two minutes: if a step starts
        on a node before the same step of the last start has ended there, neither ends."""
        self.wait(job, "PENDING")
        last = f"spool-*/*_{job}.*"
        self.wait_for(f"end of job {job}", lambda: not any(self.folder.glob(last)))
        # A node refuses credentials of the second in which it revoked the job's last one.
        ended = int(time.time())
        self.wait_for("the next second", lambda: int(time.time()) > ended)
        self.run("scontrol", "update", f"jobid={job}", "starttime=now", *changes)

    def seconds(self, job: str) -> int:
        """How long a job has been running."""
        text = self.job(job)["RunTime"]
        hours, minutes, seconds = map(int, text.split(":"))
        return (hours * 60 + minutes) * 60 + seconds

    def states(self) -> dict[str, int]:
        """How many nodes are in each state."""
        found: dict[str, int] = {}
        for state in self.run("sinfo", "-h", "-N", "-p", "gpu", "-o", "%T", check=False).split():
            found[state] = found.get(state, 0) + 1
        return found

    def wait_until_idle(self) -> None:
        """Cancel every job and wait until all nodes are free again."""
        self.run("scancel", "--user=root", check=False)
        self.wait_for("idle nodes", lambda: self.states() == {"idle": len(self.nodes)})

    def fail_node(self, host: Host) -> None:
        """The controller gives up on a node, as it does after `SlurmdTimeout` without an answer.
        The node comes back by itself."""
        self.run("scontrol", "update", f"nodename={host.name}", "state=down", "reason=test")

    def forget(self) -> None:
        """Make Slurm forget every job, as it does some minutes after a job's end."""
        self.stop_controller()
        self.start_controller("-c")
        self.wait_until_idle()

    def stop_controller(self) -> None:
        pid = (self.folder / "slurmctld.pid").read_text().strip()
        self.login.run("kill", pid)
        self.wait_for("end of the controller", lambda: not self._runs(pid))

    @contextlib.contextmanager
    def silent_controller(self) -> Iterator[None]:
        """The controller answers nothing inside the block."""
        pid = (self.folder / "slurmctld.pid").read_text().strip()
        self.login.run("kill", "-STOP", pid)
        try:
            yield
        finally:
            self.login.run("kill", "-CONT", pid)

    def _runs(self, pid: str) -> bool:
        return "slurmctld" in self.login.run("sh", "-c", f"ps -o comm= -p {pid}; true")

    def start_controller(self, *options: str) -> None:
        self._daemon(self.login, "/usr/sbin/slurmctld", *options)

    def start_node(self, host: Host) -> None:
        self._daemon(host, "/usr/sbin/slurmd", "-N", host.name)

    def _configure(self) -> None:
        for name in ("state", "munge", "cgroup", *(f"spool-{host.name}" for host in self.nodes)):
            (self.folder / name).mkdir(parents=True, mode=0o700)
        self.folder.chmod(0o755)
        self.shared.mkdir(mode=0o777)
        nodes = "\n".join(
            f"NodeName={host.name} NodeAddr={host.address} CPUs=16 RealMemory=16000"
            f" Gres=gpu:{GPU}:{GPUS}"
            for host in self.nodes
        )
        config = _CONFIG.format(
            controller=self.login.name,
            address=self.login.address,
            folder=self.folder,
            nodes=nodes,
        )
        (self.folder / "slurm.conf").write_text(config)
        (self.folder / "impatient.conf").write_text(f"{config}MessageTimeout=3\n")
        (self.folder / "cgroup.conf").write_text(_CGROUP.format(folder=self.folder))
        # Slurm takes a device's number from the end of its name.
        for gpu in range(GPUS):
            os.mknod(self.folder / f"gpu{gpu}", 0o666 | 0o020000, os.makedev(1, 3))
        (self.folder / "gres.conf").write_text(
            f"Name=gpu Type={GPU} File={self.folder}/gpu[0-{GPUS - 1}]\n"
        )

    def _start_munge(self) -> None:
        folder = self.folder / "munge"
        key = folder / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        # Every host sees this socket. Users other than root may open it too.
        folder.chmod(0o711)
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log",
                 "seed-file": "seed"}  # fmt: skip
        options = [f"--{option}={folder}/{name}" for option, name in files.items()]
        self._daemon(self.login, "/usr/sbin/munged", "--force", *options)
        self.wait_for("munged", (folder / "socket").exists)

    def _daemon(self, host: Host, program: str, *options: str) -> None:
        config = [] if "munged" in program else ["-f", str(self.folder / "slurm.conf")]
        host.run("env", *_pairs(self.environment), program, *config, *options)

    def _let_logins_in(self) -> None:
        """Sites put the configuration in /etc/slurm; here a login's environment names it."""
        config = self.login.folder / "sshd_config"
        config.write_text(config.read_text() + f"SetEnv {' '.join(_pairs(self.environment))}\n")
        self.login.stop_sshd()
        self.login.start_sshd()
        self.login.wait_for_sshd(time.monotonic() + HANG)

    def wait_for(self, what: str, is_so: Callable[[], bool]) -> None:
        """Wait until something is so, or fail with the logs of the daemons."""
        deadline = time.monotonic() + HANG
        while not is_so():
            assert time.monotonic() < deadline, f"no {what}\n{self._logs()}"
            time.sleep(0.05)

    def _logs(self) -> str:
        return "\n".join(path.read_text(errors="replace") for path in self.folder.glob("*.log"))


def _pairs(environment: dict[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in environment.items()]


def config_for_login(slurm: Slurm, launcher: Launcher) -> None:
    """Write an SSH configuration in which the login node is ``login01``."""
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


@pytest.fixture(scope="session")
def one_slurm() -> Iterator[Slurm]:
    with Slurm() as slurm:
        yield slurm


@pytest.fixture
def slurm(one_slurm: Slurm) -> Iterator[Slurm]:
    """All nodes are idle when the test begins."""
    yield one_slurm
    one_slurm.wait_until_idle()


WriteJob = Callable[..., Path]


@pytest.fixture
def write_job(slurm: Slurm, launcher: Launcher) -> WriteJob:
    """Writes a cluster file for a Python program, with two workers on each of two nodes."""

    def write(program: str, *, slurm: Mapping[str, Any] | None = None, **keys: Any) -> Path:
        script = launcher.folder / "program.py"
        script.write_text(program)
        cluster = {"slurm": dict(slurm or {}), "nodes": 2, "gpus": 2, "python": sys.executable}
        text = {
            "name": "test",
            **({"notify": keys.pop("notify")} if "notify" in keys else {}),
            "cluster": keys.pop("cluster", cluster),
            "job": {"framework": "none", "script": str(script), **keys},
        }
        path = launcher.folder / "cluster.yaml"
        path.write_text(yaml.safe_dump(text, sort_keys=False))
        return path

    return write
