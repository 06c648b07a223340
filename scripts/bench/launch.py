#!/usr/bin/env python3
"""Measures the time until every worker runs: `dtrain launch` against plain SSH fan-out.

    sudo .venv/bin/python scripts/bench/launch.py [--hosts 2 4 8] [--rounds 5]

Hosts are network namespaces with an sshd each (scripts/cluster.py). Every contestant starts the
same one-line Python on every host, which prints its start time. The result is the time from the
start of the contestant to the last of these. The baselines are one `ssh` process per host, all at
once, and `pdsh` if it is installed. They only start a process; dtrain also checks the hosts, starts
all or none, stores the output and cleans up. A launch with `--no-check` shows the cost of the
check. Rounds are interleaved, and ratios are ratios of medians: below 1, dtrain is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cluster import Cluster
from namespace_host import ClusterError

WORKER = "import time; print('began', time.time(), flush=True)"


@dataclass(frozen=True)
class Sample:
    """Seconds until the last worker began, until all ended, and of CPU time on this machine."""

    started: float
    ended: float
    cpu: float


def sample(run: Callable[[], str], hosts: int) -> Sample:
    """Time one contestant. Raises ValueError unless a worker began on every host."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begun = time.time()
    output = run()
    ended = time.time()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    times = [float(line.rpartition("began ")[2]) for line in output.splitlines() if "began" in line]
    if len(times) != hosts:
        raise ValueError(f"{len(times)} of {hosts} workers began:\n{output}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Sample(max(times) - begun, ended - begun, cpu)


def dtrain(cluster: Cluster, folder: Path, *options: str) -> Callable[[], str]:
    script = folder / "worker.py"
    script.write_text(WORKER)
    file = folder / "cluster.yaml"
    job = {"framework": "torch", "script": str(script)}
    # JSON is YAML.
    file.write_text(json.dumps({"name": "bench", "cluster": cluster.section(), "job": job}))
    command = [str(Path(sys.executable).with_name("dtrain")), "launch", str(file), *options]
    environment = {**os.environ, "DTRAIN_HOME": str(folder / "home"), "HOME": str(folder)}

    def run() -> str:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        return done.stdout if done.returncode == 0 else done.stderr

    return run


def unchecked(cluster: Cluster, folder: Path) -> Callable[[], str]:
    return dtrain(cluster, folder, "--no-check")


def ssh(cluster: Cluster, _folder: Path) -> Callable[[], str]:
    remote = f'{sys.executable} -c "{WORKER}"'

    def run() -> str:
        processes = [
            subprocess.Popen([*cluster.ssh(host), remote], stdout=subprocess.PIPE, text=True)
            for host in cluster.hosts
        ]
        return "".join(process.communicate()[0] for process in processes)

    return run


def pdsh(cluster: Cluster, folder: Path) -> Callable[[], str]:
    options = cluster.ssh(cluster.hosts[0])[1:-1]
    command = ["pdsh", "-R", "ssh", "-l", "root", "-w", ",".join(h.address for h in cluster.hosts)]
    environment = {**os.environ, "PDSH_SSH_ARGS_APPEND": " ".join(options), "HOME": str(folder)}

    def run() -> str:
        return subprocess.run(
            [*command, f'{sys.executable} -c "{WORKER}"'],
            capture_output=True,
            text=True,
            env=environment,
            check=False,
        ).stdout

    return run


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    contestants = {"dtrain": dtrain, "--no-check": unchecked, "ssh": ssh}
    if shutil.which("pdsh"):
        contestants["pdsh"] = pdsh
    print(f"median of {arguments.rounds} rounds, in seconds")
    print("hosts  contestant  all started   all ended   CPU here")
    for count in arguments.hosts:
        with Cluster(count) as cluster, tempfile.TemporaryDirectory() as name:
            runs = {key: make(cluster, Path(name)) for key, make in contestants.items()}
            samples: dict[str, list[Sample]] = {key: [] for key in runs}
            for _ in range(arguments.rounds):
                for key, run in runs.items():
                    samples[key].append(sample(run, count))
        medians = {
            key: Sample(
                *(
                    statistics.median(getattr(one, field) for one in taken)
                    for field in ("started", "ended", "cpu")
                )
            )
            for key, taken in samples.items()
        }
        for key, median in medians.items():
            row = f"{median.started:11.2f} {median.ended:11.2f} {median.cpu:10.2f}"
            print(f"{count:5}  {key:10} {row}")
        for key, median in medians.items():
            if key != "dtrain":
                ours = medians["dtrain"]
                print(
                    f"{count:5}  dtrain / {key}: started {ours.started / median.started:.2f}x,"
                    f" ended {ours.ended / median.ended:.2f}x, CPU {ours.cpu / median.cpu:.2f}x"
                )
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ClusterError as error:
        sys.exit(f"error: {error}")
