#!/usr/bin/env python3
"""Measures how `dtrain check` scales with the number of hosts, against a bare SSH fan-out.

    sudo .venv/bin/python scripts/bench/check.py [--hosts 2 4 8 16] [--rounds 5]

Hosts are network namespaces with an sshd each (scripts/cluster.py), all on this machine. So the
work of all hosts adds up, whereas real hosts each have their own processors. The baseline is one
`ssh` process per host, all at once, that starts Python and exits. A check also gathers facts, runs
the job's interpreter, and makes every host dial every other host. The job has a fake torch, because
a real import would dominate the time. Rounds are interleaved, and ratios are ratios of medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cluster import Cluster
from namespace_host import ClusterError

TORCH = """\
__version__ = "2.6.0"
class version: cuda = hip = None
class cuda:
    device_count = staticmethod(lambda: 0)
    is_available = staticmethod(lambda: False)
class distributed:
    is_available = staticmethod(lambda: True)
    is_nccl_available = staticmethod(lambda: False)
"""


def check(cluster: Cluster, folder: Path) -> Callable[[], None]:
    (folder / "torch.py").write_text(TORCH)
    script = folder / "train.py"
    script.write_text("")
    job = {"framework": "torch", "script": str(script), "env": {"PYTHONPATH": str(folder)}}
    file = folder / "cluster.yaml"
    # JSON is YAML.
    file.write_text(json.dumps({"name": "bench", "cluster": cluster.section(), "job": job}))
    command = [str(Path(sys.executable).with_name("dtrain")), "check", str(file)]
    environment = {**os.environ, "DTRAIN_HOME": str(folder / "home"), "HOME": str(folder)}

    def run() -> None:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)

    return run


def ssh(cluster: Cluster, _folder: Path) -> Callable[[], None]:
    def run() -> None:
        processes = [
            subprocess.Popen([*cluster.ssh(host), f"{sys.executable} -c pass"])
            for host in cluster.hosts
        ]
        if any(process.wait() for process in processes):
            raise ClusterError("a host could not be reached by ssh")

    return run


def seconds(run: Callable[[], None]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    print(f"median of {arguments.rounds} rounds, in seconds")
    print("hosts      check        ssh   check / ssh")
    for count in arguments.hosts:
        with Cluster(count) as cluster, tempfile.TemporaryDirectory() as name:
            runs = [make(cluster, Path(name)) for make in (check, ssh)]
            taken = [[seconds(run) for run in runs] for _ in range(arguments.rounds)]
        ours, theirs = (statistics.median(each) for each in zip(*taken, strict=True))
        print(f"{count:5} {ours:10.2f} {theirs:10.2f} {ours / theirs:12.2f}x", flush=True)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ClusterError as error:
        sys.exit(f"error: {error}")
