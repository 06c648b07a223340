"""The report has the host kernel's messages about the end of a process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cluster import Cluster
from support.cluster import Launcher

pytestmark = pytest.mark.netns
Hosts = Callable[..., Cluster]


def with_kernel_logs(cluster: Cluster) -> Cluster:
    """Give each host a separate kernel log, a file: the real log belongs to this machine."""
    for host in cluster.hosts:
        log = host.home / "kmsg"
        log.touch()
        host.run("mount", "--bind", str(log), "/dev/kmsg")
    return cluster


# A GPU fails on the second rank's host, and the first rank notices it first.
LOSES_A_GPU = """
import os, sys, time
from pathlib import Path
if os.environ["DTRAIN_ATTEMPT"] == "1":
    failed = Path(sys.argv[1])
    if os.environ["RANK"] == "1":
        with open("/dev/kmsg", "a") as log:
            now = time.clock_gettime(time.CLOCK_MONOTONIC_RAW) * 1e6
            fallen = "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."
            log.write("3,1,%d,-;%s\\n" % (now, fallen))
        failed.touch()
        time.sleep(600)
    while not failed.exists():
        time.sleep(0.02)
    raise RuntimeError("[gloo] Connection closed by peer [10.0.0.2]:1234")
print("trained on", os.environ["DTRAIN_HOST"], flush=True)
"""


def test_a_spare_takes_the_place_of_a_host_whose_gpu_fails(
    hosts: Hosts, launcher: Launcher
) -> None:
    cluster = with_kernel_logs(hosts(3))
    script = launcher.folder / "train.py"
    script.write_text(LOSES_A_GPU)
    job = {"framework": "torch", "script": str(script), "restart": {"max": 1}}
    job["args"] = [str(launcher.folder / "failed")]
    file = launcher.file(cluster, job, hosts=["node1", "node2"], spares=["node3"], gpus=1)
    done = launcher.run(file)
    assert done.code == 0, str(done)
    assert "node2: the GPU at 0000:3b:00 fell off the bus (Xid 79)" in done.stderr
    assert "node3 replaces node2" in done.stderr
    assert "trained on node3" in done.stdout
    assert launcher.left(cluster) == {}


FAILS_LONG_AFTER = """
import os, time
if os.environ["DTRAIN_ATTEMPT"] == "1" and os.environ["RANK"] == "1":
    an_hour_ago = (time.clock_gettime(time.CLOCK_MONOTONIC_RAW) - 3600) * 1e6
    with open("/dev/kmsg", "a") as log:
        log.write("3,1,%d,-;NVRM: Xid (PCI:0000:3b:00): 74, NVLink\\n" % an_hour_ago)
    raise ValueError("bad batch")
print("trained on", os.environ["DTRAIN_HOST"], flush=True)
"""


def test_an_old_fault_costs_no_spare(hosts: Hosts, launcher: Launcher) -> None:
    cluster = with_kernel_logs(hosts(3))
    script = launcher.folder / "train.py"
    script.write_text(FAILS_LONG_AFTER)
    job = {"framework": "torch", "script": str(script), "restart": {"max": 1}}
    file = launcher.file(cluster, job, hosts=["node1", "node2"], spares=["node3"], gpus=1)
    done = launcher.run(file)
    assert done.code == 0, str(done)
    assert "rank 1 on node2 exited with status 1" in done.stderr
    assert "node3 replaces" not in done.stderr
    assert "trained on node2" in done.stdout


KILLED = """
import os, signal, time
now = time.clock_gettime(time.CLOCK_MONOTONIC_RAW) * 1e6
with open("/dev/kmsg", "a") as log:
    killed = "Out of memory: Killed process %d (python) total-vm:1kB" % os.getpid()
    log.write("3,1,%d,-;%s\\n" % (now, killed))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("backend", ["direct", pytest.param("static", marks=pytest.mark.torch)])
def test_an_oom_killed_process_is_named(hosts: Hosts, launcher: Launcher, backend: str) -> None:
    cluster = with_kernel_logs(hosts(1))
    script = launcher.folder / "train.py"
    script.write_text(KILLED)
    job = {"framework": "torch", "script": str(script), "rendezvous": {"backend": backend}}
    done = launcher.run(launcher.file(cluster, job), "--no-check")
    assert done.code == 1, str(done)
    assert "rank 0 on node1 was killed by the kernel's out-of-memory killer" in done.stderr
    assert "hint: the host's memory was full" in done.stderr
    shown = launcher.command("ps", next((launcher.home / "runs").iterdir()).name).wait()
    assert "was killed by the kernel's out-of-memory killer" in shown.stdout
