"""What every engine does the same way: the commands, the output and the reports of one job.

A stage runs it on its own cluster:

    class TestSlurm(Contract):
        @pytest.fixture
        def engine(self, slurm, launcher):
            return Engine(launcher, section, ("node1", "node2"), slurm.environment)
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from dtrain import hostlist
from dtrain.messages.telemetry import Sample
from dtrain.runs import telemetry
from dtrain.session.reporting.recorder import UNMATCHED
from support.cluster import Launcher
from support.launching import Launch
from support.limits import until
from support.runs import averages

WAIT = 'import time\nprint("up", flush=True)\ntime.sleep(500)\n'
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


class Engine:
    """Runs programs with two workers on each of two hosts. Only ``cluster`` of the file differs."""

    def __init__(
        self,
        launcher: Launcher,
        section: Mapping[str, Any],
        hosts: tuple[str, str],
        environment: Mapping[str, str] | None = None,
        megabytes: int = 100,
        streams_of_ranks: bool = True,
    ) -> None:
        """``hosts``: their names in the output. ``megabytes``: of a long output.
        ``streams_of_ranks``: whether each rank of a torchrun has its own."""
        self.hosts = hosts
        self.streams_of_ranks = streams_of_ranks
        self.megabytes = megabytes
        self._launcher = launcher
        self._section = section
        self._environment = environment
        self._program = shared_folder(launcher) / "program.py"

    def start(self, program: str, *args: str, **job: object) -> Launch:
        self._program.write_text(program)
        text = {
            "name": "test",
            "cluster": self._section,
            "job": {"framework": "none", "script": str(self._program), **job},
        }
        file = self._launcher.folder / "cluster.yaml"
        file.write_text(yaml.safe_dump(text, sort_keys=False))
        return self.command("launch", str(file), *args)

    def command(self, *argv: str) -> Launch:
        return self._launcher.command(*argv, env=self._environment)

    def log(self, rank: int) -> bytes:
        """What a rank wrote to stdout."""
        return self._launcher.log(self.hosts[rank // 2], f"worker-{rank}.out")

    def run(self) -> str:
        """The name of the only run."""
        (run,) = (self._launcher.home / "runs").iterdir()
        return run.name

    def sampled(self, samples: Callable[[Path, str], list[Sample]]) -> dict[str, set[str]]:
        """The processes that ``samples`` of each host show with some memory."""
        folder = self._launcher.home / "runs" / self.run()
        return {
            host: {
                use.process
                for sample in samples(folder, host)
                for use in sample.ranks
                if use.memory > 1e6
            }
            for host in self.hosts
        }

    def go(self) -> None:
        """Let programs end that wait for it."""
        (self._program.parent / "go").touch()

    def report(self, launch: Launch) -> str:
        """What a launch says about the end of a job that fails, with ``PROGRAM`` for its path."""
        done = launch.wait()
        assert done.code == 1, str(done)
        report = done.stderr.partition("\nerror: ")[2].partition("\ndtrain: ")[0]
        return report.replace(str(self._program), "PROGRAM")

    def left(self) -> list[str]:
        """Processes of the job on all hosts, which are namespaces of this machine."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes()
            except OSError:  # it has ended
                continue
            if bytes(self._program) in words:
                found.append(words.replace(b"\0", b" ").decode())
        return found


def shared_folder(launcher: Launcher) -> Path:
    """A folder that all hosts are to see under this path."""
    folder = launcher.folder / "shared"
    folder.mkdir(exist_ok=True)
    return folder


class Contract:
    """For every engine."""

    def test_output_arrives_byte_exact(self, engine: Engine) -> None:
        """Much of one rank; only the others are shown."""
        program = f"""\
import os, sys
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
open(os.environ["DTRAIN_RUN_DIR"] + "/sample-1.out", "w").write("its own")
if os.environ["RANK"] == "0":
    for _ in range({engine.megabytes}):
        sys.stdout.buffer.write(bytes(range(250)) * 4000)
    print()
"""
        done = engine.start(program, "--rank", "1-3").wait()
        assert done.code == 0, str(done)
        assert "all 4 workers finished" in done.stderr
        first, second = engine.hosts
        expected = [
            f"[{first} 1] rank 1 of 4",
            *(f"[{second} {n}] rank {n} of 4" for n in (2, 3)),
        ]
        assert sorted(done.stdout.splitlines()) == expected
        assert (
            engine.log(0) == b"rank 0 of 4\n" + bytes(range(250)) * 4000 * engine.megabytes + b"\n"
        )

    def test_the_first_failure_is_named_with_its_traceback(self, engine: Engine) -> None:
        program = """\
import os, time
def step(batch):
    raise ValueError(f"bad batch {batch}")
if os.environ["RANK"] == "2":
    step(7)
time.sleep(500)
"""
        report = engine.report(engine.start(program))
        # Since Python 3.13, a traceback underlines calls.
        assert re.sub(r"(?m)^ *[~^]+\n", "", report) == (
            f"rank 2 on {engine.hosts[1]} exited with status 1\n\n"
            "    Traceback (most recent call last):\n"
            '      File "PROGRAM", line 5, in <module>\n'
            "        step(7)\n"
            '      File "PROGRAM", line 3, in step\n'
            '        raise ValueError(f"bad batch {batch}")\n'
            "    ValueError: bad batch 7\n"
        )
        assert engine.left() == []

    def test_a_rank_of_torchrun_is_named(self, engine: Engine) -> None:
        program = """\
import os, pathlib, time
# Ranks may share a stream.
os.write(1, f"rank {os.environ['RANK']}\\n".encode())
folder = pathlib.Path(__file__).parent
(folder / f"up-{os.environ['RANK']}").touch()
if os.environ["RANK"] == "3":
    while len([*folder.glob("up-*")]) < 4:
        time.sleep(0.05)
    raise ValueError("bad batch")
time.sleep(500)
"""
        launch = engine.start(program, framework="torch", rendezvous={"backend": "static"})
        report = engine.report(launch)
        for rank in range(4):
            node = rank // 2
            label = rank if engine.streams_of_ranks else f"torchrun{node}"
            line = rf"^\[{engine.hosts[node]} +{label}\] rank {rank}$"
            assert re.search(line, launch.stdout, re.MULTILINE), launch.stdout
        assert report.startswith(f"rank 3 on {engine.hosts[1]} exited with")
        assert "    ValueError: bad batch\n" in report, report

    def test_ctrl_c_ends_every_process(self, engine: Engine) -> None:
        launch = engine.start(WAIT)
        launch.until("] up", count=4)
        launch.process.send_signal(signal.SIGINT)
        done = launch.wait()
        assert done.code == 130, str(done)
        assert ": Ctrl-C; logs in" in done.stderr
        assert engine.left() == []

    def test_a_detached_run_is_followed_by_other_commands(self, engine: Engine) -> None:
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
        assert engine.left() == []

    def test_another_process_takes_over_from_a_killed_launcher(self, engine: Engine) -> None:
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

    @pytest.mark.parametrize("others", ["run on", "end", "fail", "notice"])
    def test_the_end_of_the_first_host_ends_the_job(self, engine: Engine, others: str) -> None:
        """As of a driver with Ray's workers. ``notice``: these fail before the driver has ended,
        because it ends."""
        program = f"""\
import os, pathlib, sys, time
folder, rank = pathlib.Path(__file__).parent, int(os.environ["RANK"])
(folder / f"up-{{rank}}").touch()
while len([*folder.glob("up-*")]) < 4:
    time.sleep(0.05)
print("up", flush=True)
if rank < 2 and "{others}" != "fail":
    (folder / "done").touch()
    time.sleep(1)
    sys.exit()
if "{others}" == "end":
    sys.exit()
if rank == 2 and "{others}" == "notice":
    while not (folder / "done").exists():
        time.sleep(0.05)
if rank == 2 and "{others}" != "run on":
    raise ValueError("no driver")
time.sleep(500)
"""
        launch = engine.start(program, success_policy="first_host")
        first, second = engine.hosts
        if others == "fail":
            report = engine.report(launch)
            assert report.startswith(f"rank 2 on {second} exited with status 1\n"), report
            assert "    ValueError: no driver\n" in report, report
        else:
            done = launch.wait()
            assert done.code == 0, str(done)
            assert f"2 workers on {first}, the first host, finished" in done.stderr
        assert engine.left() == []

    @pytest.mark.parametrize("line", ["step {step}", "iter {step}"])
    def test_a_pattern_that_matches_no_line_causes_a_warning(
        self, engine: Engine, line: str
    ) -> None:
        """Only the first launcher sees the line."""
        program = """\
import os, time
print("step 7", flush=True)
while not os.path.exists(__file__.replace("program.py", "go")):
    time.sleep(0.1)
"""
        launch = engine.start(program, progress={"line": line})
        launch.until("0] step 7\n")
        if line.startswith("step"):
            until(lambda: "step 7" in engine.command("ps", engine.run()).wait().stdout, "a step")
        launch.kill()
        engine.go()
        done = engine.command("attach", engine.run()).wait()
        assert done.code == 0, str(done)
        assert (UNMATCHED.split("\n")[0] in done.stderr) is line.startswith("iter"), str(done)

    def test_a_hang_is_located_and_the_hosts_are_sampled(self, engine: Engine) -> None:
        # Without `then: restart`, the end of a hang is final.
        launch = engine.start(HANG, watchdog={"silence": "10s"}, restart={"max": 3})
        launch.until("] up")
        first, second = engine.hosts
        everyone = {first: {"rank-0", "rank-1"}, second: {"rank-2", "rank-3"}}
        until(lambda: engine.sampled(latest) == everyone, "a sample of each machine")
        engine.go()
        report = engine.report(launch)
        assert report.startswith("no output and no progress from any worker for 10 s")
        waiting = "in wait, called by"
        assert f"ranks 0-1, 3 on {hostlist.fold([first, second])}: {waiting} all_reduce" in report
        assert f"rank 2 on {second}: {waiting} load_batch" in report
        assert engine.left() == []
        assert engine.sampled(averages) == everyone


def latest(folder: Path, host: str) -> list[Sample]:
    sample = telemetry.latest(folder, host)
    return [sample] if sample else []
