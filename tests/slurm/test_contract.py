"""One job on every engine: the same commands, output and reports, on the same machines.

Only ``cluster`` differs. SSH starts the processes on the first two nodes, and Slurm chooses them.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dtrain import hostlist
from dtrain.messages.telemetry import Sample
from dtrain.runs import telemetry
from support.cluster import Launcher
from support.launching import Launch
from support.limits import until
from support.runs import averages
from support.slurm import GPUS, Slurm, WriteJob

pytestmark = [pytest.mark.slurm, pytest.mark.netns, pytest.mark.sshd]

WAIT = 'import time\nprint("up", flush=True)\ntime.sleep(500)\n'


class Engine:
    def __init__(self, name: str, slurm: Slurm, launcher: Launcher, write_job: WriteJob) -> None:
        self._slurm = slurm
        self._launcher = launcher
        self._write_job = write_job
        self._keys: dict[str, Any] = {}
        if name == "ssh":
            nodes = [host.name for host in slurm.nodes[:2]]
            addresses = {host.name: {"address": host.address} for host in slurm.nodes[:2]}
            section = slurm.cluster.section(hosts=nodes, overrides=addresses, gpus=GPUS)
            self._keys = {"cluster": section}

    def start(self, program: str, *args: str, **job: object) -> Launch:
        # The fake GPUs are no GPUs for the check before an SSH launch.
        file = self._write_job(program, **self._keys, **job)
        return self.command("launch", str(file), "--no-check", *args)

    def command(self, *argv: str) -> Launch:
        return self._launcher.command(*argv, env=self._slurm.environment)

    def log(self, rank: int) -> bytes:
        """What a rank wrote to stdout: two ranks on each node."""
        return self._launcher.log(self._slurm.nodes[rank // 2].name, f"worker-{rank}.out")

    def run(self) -> str:
        """The name of the only run."""
        (run,) = (self._launcher.home / "runs").iterdir()
        return run.name

    def sampled(self, samples: Callable[[Path, str], list[Sample]]) -> dict[str, set[str]]:
        """The processes that ``samples`` of each host show with some memory."""
        folder = self._launcher.home / "runs" / self.run()
        return {
            host.name: {
                use.process
                for sample in samples(folder, host.name)
                for use in sample.ranks
                if use.memory > 1e6
            }
            for host in self._slurm.nodes[:2]
        }

    def go(self) -> None:
        """Let programs end that wait for it."""
        (self._launcher.folder / "go").touch()

    def left(self) -> dict[str, dict[int, str]]:
        """Processes of jobs on the nodes."""
        found = {host.name: host.processes() for host in self._slurm.nodes}
        return {
            host: mine
            for host, every in found.items()
            if (mine := {pid: text for pid, text in every.items() if "program.py" in text})
        }


@pytest.fixture(params=["ssh", "slurm"])
def engine(
    request: pytest.FixtureRequest, slurm: Slurm, launcher: Launcher, write_job: WriteJob
) -> Engine:
    return Engine(request.param, slurm, launcher, write_job)


def test_output_arrives_byte_exact(engine: Engine, slurm: Slurm) -> None:
    """100 MB of one rank; only the others are shown."""
    program = """\
import os, sys
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
open(os.environ["DTRAIN_RUN_DIR"] + "/sample-1.out", "w").write("its own")
if os.environ["RANK"] == "0":
    for _ in range(100):
        sys.stdout.buffer.write(bytes(range(250)) * 4000)
"""
    done = engine.start(program, "--rank", "1-3").wait()
    assert done.code == 0, str(done)
    assert "all 4 workers finished" in done.stderr
    first, second = (host.name for host in slurm.nodes[:2])
    expected = [f"[{first} 1] rank 1 of 4", *(f"[{second} {n}] rank {n} of 4" for n in (2, 3))]
    assert sorted(done.stdout.splitlines()) == expected
    assert engine.log(0) == b"rank 0 of 4\n" + bytes(range(250)) * 400_000


def test_the_first_failure_is_named_with_its_traceback(engine: Engine, slurm: Slurm) -> None:
    program = """\
import os, time
if os.environ["RANK"] == "2":
    raise ValueError("bad batch")
time.sleep(500)
"""
    done = engine.start(program).wait()
    assert done.code == 1, str(done)
    _, found, report = done.stderr.partition(
        f"\nerror: rank 2 on {slurm.nodes[1].name} exited with status 1\n"
    )
    assert found, str(done)
    assert 'program.py", line 3, in <module>' in report
    assert "    ValueError: bad batch\n" in report
    assert engine.left() == {}


def test_a_rank_of_torchrun_is_named(engine: Engine, slurm: Slurm) -> None:
    program = """\
import os, pathlib, time
print("rank", os.environ["RANK"], flush=True)
folder = pathlib.Path(__file__).parent
(folder / f"up-{os.environ['RANK']}").touch()
if os.environ["RANK"] == "3":
    while len([*folder.glob("up-*")]) < 4:
        time.sleep(0.05)
    raise ValueError("bad batch")
time.sleep(500)
"""
    done = engine.start(program, framework="torch", rendezvous={"backend": "static"}).wait()
    assert done.code == 1, str(done)
    for rank in range(4):
        node = slurm.nodes[rank // 2].name
        assert re.search(rf"^\[{node} +{rank}\] rank {rank}$", done.stdout, re.MULTILINE)
    report = done.stderr.partition(f"\nerror: rank 3 on {slurm.nodes[1].name} exited with")[2]
    assert "    ValueError: bad batch\n" in report, str(done)


def test_ctrl_c_ends_every_process(engine: Engine) -> None:
    launch = engine.start(WAIT)
    launch.until("] up", count=4)
    launch.process.send_signal(signal.SIGINT)
    done = launch.wait()
    assert done.code == 130, str(done)
    assert ": Ctrl-C; logs in" in done.stderr
    assert engine.left() == {}


def test_a_detached_run_is_followed_by_other_commands(engine: Engine) -> None:
    done = engine.start(WAIT, "--detach").wait()
    assert done.code == 0, str(done)
    run = done.stdout.strip()
    logs = engine.command("logs", "--follow", run)
    logs.until("] up", count=4)
    attached = engine.command("attach", run)
    attached.until("4 workers on 2 hosts")
    assert engine.command("stop", run).wait().code == 0
    assert attached.wait().code == 130
    assert logs.wait().code == 0
    assert engine.left() == {}


def test_another_process_takes_over_from_a_killed_launcher(engine: Engine) -> None:
    program = """\
import os, time
for step in range(60):
    print(step, flush=True)
    time.sleep(0.02)
while not os.path.exists(__file__.replace("program.py", "go")):
    time.sleep(0.1)
"""
    launch = engine.start(program)
    launch.until("0] 1\n")
    launch.kill()
    shown = engine.command("ps", engine.run()).wait().stdout
    assert "unattended" in shown and "running" in shown
    engine.go()
    done = engine.command("attach", engine.run()).wait()
    assert done.code == 0, str(done)
    for rank in range(4):
        assert engine.log(rank) == "".join(f"{step}\n" for step in range(60)).encode()


HANG = """\
import os, threading, time

while not os.path.exists(__file__.replace("program.py", "go")):
    print("up", flush=True)
    time.sleep(0.5)

def all_reduce():
    threading.Event().wait()

def load_batch():
    threading.Event().wait()

load_batch() if os.environ["RANK"] == "2" else all_reduce()
"""


def latest(folder: Path, host: str) -> list[Sample]:
    sample = telemetry.latest(folder, host)
    return [sample] if sample else []


def test_a_hang_is_located_and_the_hosts_are_sampled(engine: Engine, slurm: Slurm) -> None:
    watchdog = {"silence": "10s"}
    # Without `then: restart`, the end of a hang is final.
    launch = engine.start(HANG, watchdog=watchdog, restart={"max": 3})
    launch.until("] up")
    first, second = (host.name for host in slurm.nodes[:2])
    everyone = {first: {"rank-0", "rank-1"}, second: {"rank-2", "rank-3"}}
    until(lambda: engine.sampled(latest) == everyone, "a sample of each machine")
    engine.go()
    done = launch.wait()
    assert done.code == 1, str(done)
    assert "error: no output and no progress from any worker for 10 s" in done.stderr
    waiting = "in wait, called by"
    assert f"ranks 0-1, 3 on {hostlist.fold([first, second])}: {waiting} all_reduce" in done.stderr
    assert f"rank 2 on {second}: {waiting} load_batch" in done.stderr
    assert engine.left() == {}
    assert engine.sampled(averages) == everyone
