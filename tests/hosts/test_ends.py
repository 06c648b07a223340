"""After any end of a launch, no process is left on any host."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cluster import Cluster
from support.cluster import Launcher, job
from support.limits import HANG

pytestmark = pytest.mark.netns
Hosts = Callable[..., Cluster]


@pytest.mark.torch
def test_a_failure_on_one_of_three_hosts(hosts: Hosts, launcher: Launcher) -> None:
    cluster = hosts(3)
    file = launcher.file(
        cluster, {"framework": "torch", "script": job("fail.py"), "args": ["2", "raise"]}
    )
    launch = launcher.start(file, "--no-check")
    launch.until("stopping the other workers", timeout=HANG)
    assert launcher.left(cluster) == {}
    done = launch.wait()
    assert done.code == 1
    report = done.stderr[done.stderr.index("\nerror: ") + 1 :]
    assert report.startswith("error: rank 2 on node3 exited with status 1\n")
    assert report.index("ValueError: bad batch on rank 2") < 2000
