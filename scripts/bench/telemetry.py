"""Measures what telemetry costs on a host with 8 GPUs and 8 workers, with and without it.

    python scripts/bench/telemetry.py [--seconds 60] [--children 4] [--connections 64]

Prints the CPU time of the agent's two processes (supervisor and relay) as percent of one core. The
GPU tool is a recording: what nvidia-smi itself takes depends on the driver. Both ends of a worker's
TCP connections are on this host, so the kernel lists twice as many.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

from dtrain import api
from dtrain.node import boot, programs
from dtrain.session.stopping.control import Control
from dtrain.transport import node_program

GPU = "%d, 00000000:%02X:00.0, 97, 70144, 81559, 612, 700, 64, 1980, 1980, 0x04, 0, 61, 2619, 0"
WORKER = """
import socket, subprocess, sys, time
children = [subprocess.Popen([sys.executable, "-ISc", "import time; time.sleep(3600)"])
            for _ in range(int(sys.argv[1]))]
server, ends = socket.create_server(("127.0.0.1", 0)), []
for _ in range(int(sys.argv[2])):
    ends.append(socket.create_connection(server.getsockname(), None, ("127.0.0.2", 0)))
    ends.append(server.accept()[0])
time.sleep(3600)
"""


def cpu_of_agents(run_mark: str) -> float:
    """CPU seconds that the agent's processes have used so far."""
    spent = 0
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and run_mark in (folder / "cmdline").read_text():
                # Exact: the times in `stat` are samples of a clock, which periodic work may follow.
                for thread in folder.glob("task/*/schedstat"):
                    spent += int(thread.read_text().split()[0])
        except OSError:
            continue
    return spent / 1e9


def as_text(name: str) -> bytes:
    """A program as text, so that `measure` can change it."""
    return boot.framed(programs.program(name))


def measure(folder: Path, args: argparse.Namespace, *, on: bool) -> float:
    """Percent of a core that the agent takes while the job runs."""
    name = f"bench-{'with' if on else 'without'}"
    programs.modules.cache_clear()
    programs.program.cache_clear()
    source, node_program.bundled = programs.source, as_text
    if not on:
        off = ("self._sampler.start()", "pass")
        programs.source = lambda module: source(module).replace(*off)
    control, running = Control(), threading.Event()
    job = folder / f"{name}.yaml"
    job.write_text(
        f"name: {name}\n"
        f"cluster: {{hosts: [a], transport: local, gpus: 0, slots: 8, run_dir: {folder}/nodes}}\n"
        f"job: {{framework: none, script: {folder}/worker.py,"
        f" args: ['{args.children}', '{args.connections}'],"
        f" rendezvous: {{port: {args.port}}}}}\n"
    )
    try:
        thread = threading.Thread(
            target=lambda: api.launch(
                str(job), check=False, control=control, on_running=lambda run: running.set()
            )
        )
        thread.start()
        running.wait()
        time.sleep(15)  # the searches of the start are over
        before = cpu_of_agents(name)
        time.sleep(args.seconds)
        return 100 * (cpu_of_agents(name) - before) / args.seconds
    finally:
        programs.source = source
        control.kill("measured")
        thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--children", type=int, default=4, help="of each worker")
    parser.add_argument("--connections", type=int, default=64, help="of each worker")
    parser.add_argument("--port", type=int, default=29731)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        (folder / "worker.py").write_text(WORKER)
        tool = folder / "bin" / "nvidia-smi"
        tool.parent.mkdir()
        lines = "\\n".join(GPU % (index, 16 + index) for index in range(8))
        tool.write_text(f"#!/bin/sh\nwhile printf '{lines}\\n'; do sleep 1; done\n")
        tool.chmod(0o755)
        os.environ["PATH"] = f"{tool.parent}:{os.environ['PATH']}"
        os.environ["DTRAIN_HOME"] = str(folder / "home")
        shares = {on: measure(folder, args, on=on) for on in (False, True)}
    print(f"without telemetry  {shares[False]:5.2f} % of a core")
    print(f"with telemetry     {shares[True]:5.2f} % of a core")
    print(f"telemetry          {shares[True] - shares[False]:5.2f} % of a core")


if __name__ == "__main__":
    sys.exit(main())
