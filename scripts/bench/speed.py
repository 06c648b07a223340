#!/usr/bin/env python3
"""Measures how fast jobs start and how fast output arrives, each beside plain SSH in the same run.

    sudo .venv/bin/python scripts/bench/speed.py [--hosts 1 8 32 64] [--rounds 3] [--megabytes 200]

Hosts are network namespaces with an sshd each (scripts/cluster.py), all on this machine: the work
of all hosts adds up on its processors. Every contestant starts the same one-line Python on every
host. `ssh` is one process for each host, all at once; `pdsh` and `clush` run if they are installed.
They only start a process; dtrain also checks the hosts, starts all or none, stores the output and
cleans up.

The last part launches on many simulated hosts, with faults, see scripts/bench/many_hosts.py.

Rounds are interleaved, so a ratio holds on a busy machine; seconds do not. Every figure is a
median. CPU is user and system time: "here" of the contestant's processes, "nodes" of everything
that ran on the hosts. Costs for each host are slopes from the smallest to the largest cluster.
"""

from __future__ import annotations

import argparse
import contextlib
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
from dataclasses import dataclass, fields
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from logs import PLAIN, show, store
from many_hosts import number_of

from cluster import Cluster
from dtrain.runs.folder import RunFolder
from namespace_host import ClusterError, Host

WORKER = "import time; print('began', time.time(), flush=True)"
# In blocks of 100 kB: dtrain's workers run unbuffered, so that each line would be a system call.
WRITER = WORKER + "; import sys; [sys.stdout.write(('x' * 99 + '\\n') * 1000) for _ in range(%d)]"
TICKS = os.sysconf("SC_CLK_TCK")
Contestant = Callable[[Path], subprocess.Popen[bytes]]
"""Starts all workers; their output goes to a file."""


@dataclass(frozen=True)
class Sample:
    """Seconds, processes' threads and their memory in MB."""

    started: float
    """From the start of the contestant to that of the last worker."""
    ended: float
    wrote: float
    """From the start of the last worker to the end of the contestant."""
    here: float
    nodes: float
    threads: float
    memory: float


class Bench:
    """Contestants on one cluster."""

    def __init__(self, cluster: Cluster, folder: Path, worker: str) -> None:
        self.cluster = cluster
        self.folder = folder
        self.script = folder / "worker.py"
        self.script.write_text(worker)
        job = {"framework": "torch", "script": str(self.script)}
        self.file = folder / "cluster.yaml"
        # JSON is YAML.
        self.file.write_text(
            json.dumps({"name": "bench", "cluster": cluster.section(), "job": job})
        )
        self.environment = {**os.environ, "DTRAIN_HOME": str(folder / "home"), "HOME": str(folder)}
        # An installed dtrain is compiled, unlike a checkout where this is set.
        self.environment.pop("PYTHONDONTWRITEBYTECODE", None)
        self.environment["PYTHONPYCACHEPREFIX"] = str(folder / "compiled")
        self.contestants: dict[str, Contestant] = {
            "dtrain": self.dtrain,
            "unchecked": lambda output: self.dtrain(output, "--no-check"),
            "ssh": self.ssh,
        }
        if shutil.which("pdsh"):
            self.contestants["pdsh"] = self.pdsh
        if shutil.which("clush"):
            self.contestants["clush"] = self.clush

    def dtrain(self, output: Path, *options: str) -> subprocess.Popen[bytes]:
        command = [str(Path(sys.executable).with_name("dtrain")), "launch", str(self.file)]
        return self._start([*command, *options], output)

    def ssh(self, output: Path) -> subprocess.Popen[bytes]:
        # The shell does nothing but start them and wait.
        lines = [
            " ".join([*self.cluster.ssh(host), f"'{self.remote}' >{output}.{host.name} &"])
            for host in self.cluster.hosts
        ]
        script = "\n".join([*lines, "wait", f"cat {output}.*"])
        return self._start(["sh", "-c", script], output)

    def pdsh(self, output: Path) -> subprocess.Popen[bytes]:
        return self._fan_out(["pdsh", "-R", "ssh", "-f", "1000", "-l", "root"], output)

    def clush(self, output: Path) -> subprocess.Popen[bytes]:
        ssh = self.cluster.ssh(self.cluster.hosts[0])[1:-1]
        return self._fan_out(["clush", "-f", "1000", "-l", "root", "-o", " ".join(ssh)], output)

    @property
    def remote(self) -> str:
        return f"{sys.executable} {self.script}"

    def _fan_out(self, command: list[str], output: Path) -> subprocess.Popen[bytes]:
        hosts = ",".join(host.address for host in self.cluster.hosts)
        options = " ".join(self.cluster.ssh(self.cluster.hosts[0])[1:-1])
        self.environment["PDSH_SSH_ARGS_APPEND"] = options
        return self._start([*command, "-w", hosts, self.remote], output)

    def _start(self, command: list[str], output: Path) -> subprocess.Popen[bytes]:
        with output.open("wb") as file:
            return subprocess.Popen(command, stdout=file, stderr=file, env=self.environment)

    def sample(self, start: Contestant) -> Sample:
        """Run one contestant. Raises ValueError unless a worker began on every host."""
        output = self.folder / "output"
        on_nodes, before = self._node_seconds(), resource.getrusage(resource.RUSAGE_CHILDREN)
        begun = time.time()
        process = start(output)
        threads = memory = 0
        while process.poll() is None:
            with contextlib.suppress(OSError, StopIteration, ValueError):
                status = Path(f"/proc/{process.pid}/status").read_text()
                threads = max(threads, number_of(status, "Threads:"))
                memory = max(memory, number_of(status, "VmHWM:"))
            time.sleep(0.02)
        ended = time.time()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        with output.open(errors="replace") as lines:
            times = [float(line.rpartition("began ")[2]) for line in lines if "began " in line]
        if len(times) != len(self.cluster.hosts):
            raise ValueError(f"{len(times)} workers began:\n{output.read_text()[:2000]}")
        for file in self.folder.glob("output*"):
            file.unlink()
        shutil.rmtree(self.folder / "home", ignore_errors=True)
        return Sample(
            max(times) - begun,
            ended - begun,
            ended - max(times),
            after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
            self._node_seconds() - on_nodes,
            threads,
            memory / 1000,
        )

    def medians(self, names: list[str], rounds: int) -> dict[str, Sample]:
        """Interleaved rounds, after one that fills caches."""
        taken: dict[str, list[Sample]] = {name: [] for name in names}
        for number in range(rounds + 1):
            for name in names:
                sample = self.sample(self.contestants[name])
                taken[name] += [sample] if number else []
        return {
            name: Sample(
                *(
                    statistics.median(getattr(one, each.name) for one in samples)
                    for each in fields(Sample)
                )
            )
            for name, samples in taken.items()
        }

    def _node_seconds(self) -> float:
        return sum(cpu_seconds(host) for host in self.cluster.hosts)


def cpu_seconds(host: Host) -> float:
    """User and system time of all processes that a host has had: init and sshd reap them."""
    total = 0
    own = Path(f"/proc/{host.pid}/task/{host.pid}/children").read_text().split()
    for pid in [str(host.pid), *own]:
        with contextlib.suppress(OSError):
            total += sum(
                map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15])
            )
    return total / TICKS


def row(title: str, ours: float, theirs: dict[str, float], unit: str) -> None:
    peers = "".join(
        f"   {name} {value:8.2f} {unit} ({ours / value:5.2f}x)" for name, value in theirs.items()
    )
    print(f"{title:42} {ours:8.2f} {unit}{peers}", flush=True)


def starts(hosts: list[int], rounds: int) -> None:
    found: dict[int, dict[str, Sample]] = {}
    for count in hosts:
        with Cluster(count) as cluster, tempfile.TemporaryDirectory() as name:
            bench = Bench(cluster, Path(name), WORKER)
            found[count] = bench.medians(list(bench.contestants), rounds)
        of = f"{count} host{'s' * (count > 1)}"
        for what, key in (("start to end", "ended"), ("all started", "started")):
            each = {name: getattr(sample, key) for name, sample in found[count].items()}
            row(f"{what}, {of}", each.pop("dtrain"), each, "s")
    few, many = min(hosts), max(hosts)
    if few == many:
        return
    for what, key, scale, unit in (
        ("CPU here for each host", "here", 1000, "ms"),
        ("CPU on the nodes for each host", "nodes", 1000, "ms"),
        ("threads for each host", "threads", 1, ""),
        ("memory for each host", "memory", 1, "MB"),
    ):
        slopes = {
            name: (getattr(sample, key) - getattr(found[few][name], key)) * scale / (many - few)
            for name, sample in found[many].items()
        }
        peers = {name: value for name, value in slopes.items() if value > 0}
        row(f"{what}, {few} to {many}", peers.pop("dtrain", 0.0), peers, unit)
    ours = found[many]["dtrain"]
    print(f"at {many} hosts: {ours.threads:.0f} threads, {ours.memory:.0f} MB")


def output(megabytes: int, rounds: int) -> None:
    with Cluster(1) as cluster, tempfile.TemporaryDirectory() as name:
        bench = Bench(cluster, Path(name), WRITER % (megabytes * 10))
        found = bench.medians(["dtrain", "ssh"], rounds)
    rates = {name: megabytes / sample.wrote for name, sample in found.items()}
    row("output of one host into files", rates.pop("dtrain"), rates, "MB/s")


def fold(rounds: int, lines: int = 200_000, streams: int = 8) -> None:
    """Lines that all ranks write, and lines that differ."""
    for title, text in (("equal", PLAIN), ("different", PLAIN.replace(b"\n", b" rank %d\n"))):
        with tempfile.TemporaryDirectory() as folder:
            os.environ["DTRAIN_HOME"] = folder
            run = RunFolder.create("bench")
            ranks = [
                run.stream("gpu01", f"worker-{rank}.out", ranked=True) for rank in range(streams)
            ]
            for rank, stream in enumerate(ranks):
                own = (rank,) if text is not PLAIN else ()
                store(b"".join(text % (one, *own) for one in range(lines // streams)), stream)
            taken: dict[bool, list[float]] = {True: [], False: []}
            for _ in range(rounds):
                for folded, times in taken.items():
                    begun = time.perf_counter()
                    show(ranks, ranks[0].path.stat().st_size, fold=folded)
                    times.append(time.perf_counter() - begun)
        folded, plain = (lines / statistics.median(taken[each]) / 1e6 for each in (True, False))
        row(f"--fold, {title} lines", folded, {"plain": plain}, "M lines/s")


def many(hosts: int) -> None:
    program = Path(__file__).with_name("many_hosts.py")
    subprocess.run([sys.executable, str(program), "--hosts", str(hosts)], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--hosts", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--megabytes", type=int, default=200, help="output of the one host")
    parser.add_argument("--many", type=int, default=256, help="simulated hosts")
    parser.add_argument("--only", choices=["starts", "output", "fold", "many"], help="one part")
    arguments = parser.parse_args()
    print(f"medians of {arguments.rounds} rounds; in parentheses dtrain / peer")
    if arguments.only in (None, "starts"):
        starts(arguments.hosts, arguments.rounds)
    if arguments.only in (None, "output"):
        output(arguments.megabytes, arguments.rounds)
    if arguments.only in (None, "fold"):
        fold(arguments.rounds)
    if arguments.only in (None, "many"):
        many(arguments.many)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ClusterError as error:
        sys.exit(f"error: {error}")
