#!/usr/bin/env python3
"""Measures what many hosts cost the launcher: `dtrain launch` on simulated hosts.

    scripts/bench/many_hosts.py [--hosts 1024] [--ranks 8] [--rate 10] [--seconds 30]

The hosts are light servers (scripts/bench/simulated_hosts.py), several in one process. They speak
real SSH and the real node protocol, so that `dtrain launch` does all its work: connect, check,
start, follow the output live, stop. Five launches, each a real process:

    start      no rank writes, and all must start and end
    output     all ranks write, and one host answers late; all must start and end
    failure    one rank fails; all hosts must stop, and the report must name it
    drop       one connection breaks; the job goes on, and no output is lost
    refusal    one host does not exist; nothing may start, and the report must name it

Prints the time to the start of all ranks, how late the lines arrive, and CPU, memory and threads of
the launcher, with the CPU of the hosts beside it. Exits with 1 if a launch does anything else.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")
SLOPE_FROM = 16
"""Hosts from which on the costs of one host are measured beside."""
IMPORTS = (
    "import dtrain_cli.commands.watch, dtrain_cli.commands.launch, dtrain.checks,"
    " dtrain.engines.ssh.controller, dtrain.transport.ssh"
)
ENDLESS = 1e6
STAMP = re.compile(rb"written (\d+\.\d+)\n")


class BenchError(Exception):
    """The launcher did something else than it must."""


@dataclass
class Hosts:
    """The processes of the simulated hosts, and what they have reported."""

    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    times: dict[str, list[float]] = field(default_factory=dict)
    launchers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            said = json.loads(line)
            self.times.setdefault(said["what"], []).append(said["time"])

    def count(self, what: str) -> int:
        return len(self.times.get(what, ()))

    def cpu(self) -> float:
        return sum(cpu_seconds(process.pid) for process in self.processes)


@dataclass
class Measured:
    """One launch. Seconds, MB."""

    exit_code: int = -1
    output: bytes = b""
    """What the launcher printed, without most lines of the ranks."""
    begun: float = 0.0
    ended: float = 0.0
    cpu_started: float = 0.0
    """CPU of the launcher when all ranks had started."""
    cpu: float = 0.0
    threads: int = 0
    """At most, which is while the hosts start."""
    threads_running: list[int] = field(default_factory=list)
    """While all ranks run."""
    memory: float = 0.0
    lines: int = 0
    lags: list[float] = field(default_factory=list)
    """How late lines arrived: one in each piece of output."""


@dataclass(frozen=True)
class Bench:
    folder: Path
    hosts: int
    ranks: int
    rate: float
    seconds: float
    processes: int
    """Of the simulated hosts."""
    port: int

    @property
    def addresses(self) -> list[str]:
        return [f"127.1.{number // 250}.{number % 250 + 1}" for number in range(self.hosts)]

    @property
    def environment(self) -> dict[str, str]:
        compiled = {
            "PYTHONPYCACHEPREFIX": str(self.folder / "compiled"),
            "PYTHONDONTWRITEBYTECODE": "",
        }
        return {
            "DTRAIN_HOME": str(self.folder / "home"),
            "HOME": str(self.folder),
            **(compiled if self.hosts >= SLOPE_FROM else {}),
        }

    def prepare(self) -> None:
        for name in ("host", "client"):
            if (self.folder / name).exists():
                continue
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name)],
                check=True,
            )
        key = (self.folder / "host.pub").read_text()
        known = "".join(f"[{address}]:{self.port} {key}" for address in self.addresses)
        (self.folder / "known_hosts").write_text(known)
        (self.folder / "train.py").write_text("")
        names = [f"gpu{number:04d}" for number in range(self.hosts)]
        cluster = {
            "hosts": names,
            "gpus": self.ranks,
            "ssh": {
                "user": "root",
                "port": self.port,
                "identity": str(self.folder / "client"),
                "known_hosts": str(self.folder / "known_hosts"),
            },
            "overrides": {
                name: {"address": address}
                for name, address in zip(names, self.addresses, strict=True)
            },
        }
        job = {"framework": "torch", "script": "train.py"}
        text = json.dumps({"name": "many", "cluster": cluster, "job": job})
        (self.folder / "cluster.yaml").write_text(text)

    @contextmanager
    def simulated(self, faults: dict[int, dict[str, float]]) -> Iterator[Hosts]:
        """The hosts, with ``faults`` by number. A host with ``missing`` does not exist."""
        found = Hosts()
        there = {
            address: {**faults.get(number, {})}
            for number, address in enumerate(self.addresses)
            if "missing" not in faults.get(number, {})
        }
        addresses = list(there)
        with ExitStack() as stack:
            for each in range(self.processes):
                settings = {
                    "hosts": {one: there[one] for one in addresses[each :: self.processes]},
                    "port": self.port,
                    "host_key": str(self.folder / "host"),
                    "client_key": str(self.folder / "client.pub"),
                    "seconds": self.seconds,
                    "rate": self.rate,
                }
                file = self.folder / f"hosts-{each}.json"
                file.write_text(json.dumps(settings))
                program = Path(__file__).with_name("simulated_hosts.py")
                process = subprocess.Popen(
                    [sys.executable, str(program), str(file)], stdout=subprocess.PIPE
                )
                stack.callback(process.wait)
                stack.callback(process.kill)
                found.processes.append(process)
                threading.Thread(target=found.read, args=(process,), daemon=True).start()
            while found.count("listening") < self.processes:
                if any(process.poll() is not None for process in found.processes):
                    raise BenchError("the simulated hosts did not start")
                time.sleep(0.05)
            try:
                yield found
            finally:
                for launcher in found.launchers:
                    launcher.kill()

    def launch(self, hosts: Hosts) -> Measured:
        """Launch the job, and follow the launcher to its end."""
        found = Measured(begun=time.time())
        program = Path(sys.executable).with_name("dtrain")
        process = subprocess.Popen(
            [str(program), "launch", str(self.folder / "cluster.yaml")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **self.environment},
        )
        hosts.launchers.append(process)
        reader = threading.Thread(target=follow, args=(process, found), daemon=True)
        reader.start()
        while process.poll() is None:
            found.cpu = max(found.cpu, cpu_seconds(process.pid))
            with contextlib.suppress(OSError, StopIteration, ValueError):
                status = Path(f"/proc/{process.pid}/status").read_text()
                now = number_of(status, "Threads:")
                found.threads = max(found.threads, now)
                if hosts.count("started") == self.hosts:
                    found.threads_running.append(now)
                found.memory = max(found.memory, number_of(status, "VmHWM:") / 1000)
            if not found.cpu_started and hosts.count("started") == self.hosts:
                found.cpu_started = found.cpu
            time.sleep(0.1)
        reader.join()
        found.exit_code = process.wait()
        found.ended = time.time()
        return found


def follow(process: subprocess.Popen[bytes], found: Measured) -> None:
    assert process.stdout is not None
    rest = b""
    while data := os.read(process.stdout.fileno(), 1 << 20):
        now = time.time()
        data, newline, rest = (rest + data).rpartition(b"\n")
        data += newline
        found.lines += data.count(b"written ")
        if stamp := STAMP.search(data):
            found.lags.append(now - float(stamp[1]))
        found.output += b"".join(
            line for line in data.splitlines(keepends=True) if b"written " not in line
        )


def number_of(status: str, key: str) -> int:
    return int(next(line for line in status.splitlines() if line.startswith(key)).split()[1])


def free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, or 0."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:13])) / TICKS


def expect(what: str, right: bool, found: Measured) -> None:
    if not right:
        text = found.output.decode(errors="replace")
        raise BenchError(f"{what} (exit {found.exit_code}):\n{text[-4000:]}")


def launched(
    title: str, bench: Bench, faults: dict[int, dict[str, float]]
) -> tuple[Measured, Hosts]:
    """Launch on simulated hosts, some of them with ``faults``, and show what it cost."""
    with bench.simulated(faults) as hosts:
        found = bench.launch(hosts)
        started = hosts.times.get("started", [])
        first = f"all started after {max(started) - found.begun:6.1f} s" if started else ""
        print(
            f"{title:8} {found.ended - found.begun:6.1f} s  {first:30}"
            f" launcher {found.cpu:6.1f} s CPU, {found.memory:4.0f} MB, {found.threads:5} threads"
            f" ({statistics.median(found.threads_running or [0]):.0f} while all run);"
            f" hosts {hosts.cpu():6.1f} s CPU",
            flush=True,
        )
    return found, hosts


def expect_all_lines(bench: Bench, found: Measured) -> None:
    expect("the job must end with 0", found.exit_code == 0, found)
    wanted = int(bench.hosts * bench.ranks * bench.rate * bench.seconds)
    expect(f"{found.lines} of {wanted} lines", found.lines == wanted, found)


def start(bench: Bench) -> None:
    found, hosts = launched("start", replace(bench, rate=0.0), {})
    expect("not all hosts started", hosts.count("started") == bench.hosts, found)
    expect("the job must end with 0", found.exit_code == 0, found)
    if bench.hosts >= SLOPE_FROM:
        costs(bench, found)


def output(bench: Bench) -> None:
    found, hosts = launched("output", bench, {bench.hosts // 2: {"slow": 2.0}})
    expect("not all hosts started", hosts.count("started") == bench.hosts, found)
    expect_all_lines(bench, found)
    lags = sorted(found.lags)
    running = found.ended - max(hosts.times["started"])
    print(
        f"         {found.lines / running:,.0f} lines/s, of"
        f" {bench.hosts * bench.ranks * bench.rate:,.0f} written;"
        f" delay {statistics.median(lags):.1f} s, at most {lags[-1]:.1f} s;"
        f" launcher {(found.cpu - found.cpu_started) / running * 100:.0f} % of a core",
        flush=True,
    )


def costs(bench: Bench, found: Measured) -> None:
    """What each host costs the launcher: the difference from a launch on one host."""
    alone = replace(bench, hosts=1, processes=1, rate=0.0, seconds=1.0)
    alone.prepare()
    with alone.simulated({}) as hosts:
        base = alone.launch(hosts)
    bench.prepare()
    more = bench.hosts - 1
    print(
        f"         each host costs the launcher"
        f" {(found.cpu_started - base.cpu_started) / more * 1000:.1f} ms CPU to start,"
        f" {(found.memory - base.memory) / more:.2f} MB,"
        f" {statistics.median(found.threads_running) / bench.hosts:.2f} threads;"
        f" one host: {base.cpu_started * 1000:.0f} ms CPU, {base.memory:.0f} MB",
        flush=True,
    )


def failure(bench: Bench) -> None:
    # No host ends by itself, however slow this machine is.
    endless = replace(bench, seconds=ENDLESS)
    found, hosts = launched("failure", endless, {bench.hosts // 3: {"fails": bench.seconds / 3}})
    expect("a failed job ends with 1", found.exit_code == 1, found)
    name = f"gpu{bench.hosts // 3:04d}".encode()
    expect(f"the report must name {name.decode()}", name in found.output, found)
    stopped = hosts.times.get("stopped", [])
    expect(f"{len(stopped)} hosts were stopped", len(stopped) == bench.hosts, found)
    spread = max(stopped) - min(stopped)
    print(f"         all {len(stopped)} hosts were told to stop within {spread:.1f} s", flush=True)


def drop(bench: Bench) -> None:
    found, _ = launched("drop", bench, {1: {"drops": bench.seconds / 3}})
    expect_all_lines(bench, found)
    expect("a notice must name gpu0001", b"gpu0001" in found.output, found)


def refusal(bench: Bench) -> None:
    found, hosts = launched("refusal", bench, {bench.hosts - 1: {"missing": 1}})
    expect("a lost host ends with 3", found.exit_code == 3, found)
    expect("nothing may start", hosts.count("started") == 0, found)
    name = f"gpu{bench.hosts - 1:04d}".encode()
    expect(f"the report must name {name.decode()}", name in found.output, found)


LAUNCHES = {"start": start, "output": output, "failure": failure, "drop": drop, "refusal": refusal}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--hosts", type=int, default=1024)
    parser.add_argument("--ranks", type=int, default=8, help="on each host")
    parser.add_argument("--rate", type=float, default=10, help="lines that a rank writes a second")
    parser.add_argument("--seconds", type=float, default=30, help="how long the ranks run")
    parser.add_argument("--processes", type=int, default=2, help="of the simulated hosts")
    parser.add_argument("--only", choices=LAUNCHES, help="one launch")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    print(
        f"{options.hosts} hosts, {options.hosts * options.ranks} ranks, {options.rate:g} lines/s"
        f" each for {options.seconds:g} s"
    )
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(
            Path(folder),
            options.hosts,
            options.ranks,
            options.rate,
            options.seconds,
            options.processes,
            free_port(),
        )
        bench.prepare()
        if bench.hosts >= SLOPE_FROM:
            # An installed dtrain is compiled.
            environment = {**os.environ, **bench.environment}
            subprocess.run([sys.executable, "-c", IMPORTS], env=environment, check=True)
        for name, launch in LAUNCHES.items():
            if options.only in (None, name):
                launch(bench)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BenchError as error:
        sys.exit(f"error: {error}")
