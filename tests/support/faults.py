"""A job of numbered lines on failing hosts, and the invariants after every fault."""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path
from typing import Any

from cluster import Cluster
from dtrain.runs.folder import RunFolder
from jobs.numbered import SIZE, step
from namespace_host import Host
from support.cluster import Launcher, job
from support.launching import Done, Launch
from support.limits import HANG, until

BYSTANDER = "bystander"
WAIT = "import time\nprint('here', flush=True)\ntime.sleep(3600)\n"


class Field:
    """Hosts with a job of one rank each, and beside it another run that nothing may touch.

    ``alive`` is for how many seconds a host may be silent before its connection counts as cut.
    """

    def __init__(self, cluster: Cluster, launcher: Launcher, *, alive: int = 10) -> None:
        self.cluster, self.launcher = cluster, launcher
        self.folder = launcher.folder / "shared"
        self.folder.mkdir()
        self.size = SIZE
        self._launches: list[Launch] = []
        launcher.notice_silence(alive)
        script = self.folder / "wait.py"
        script.write_text(WAIT)
        waiting = {"framework": "torch", "script": str(script), "rendezvous": {"port": 31000}}
        file = launcher.file(cluster, waiting, name="bystander.yaml", title=BYSTANDER)
        # Its run is elsewhere: tests fill or hide the folder of the job's run.
        home = {"DTRAIN_HOME": str(launcher.folder / "bystander-home")}
        self._bystander = launcher.start(file, "--no-check", env=home)
        self._untouched: dict[str, set[int]] = {}

    # The job -----------------------------------------------------------------------------------

    def file(self, *, pause: float = 0.05, size: int = SIZE, **job_section: Any) -> Path:
        self.size = size
        section = {
            "framework": "torch",
            "script": job("numbered.py"),
            "args": [str(self.folder), str(pause), str(size)],
        }
        return self.launcher.file(self.cluster, {**section, **job_section})

    def start(self, file: Path, *args: str, **options: Any) -> Launch:
        """Launch the job; returns when all ranks, and the bystander's, write."""
        launch = self.command("launch", str(file), *args, **options)
        self.until_running(launch)
        return launch

    def until_running(self, launch: Launch) -> None:
        ended = launch.process.poll
        until(lambda: ended() is not None or min(self.steps()) > 5, "the first steps")
        assert ended() in (None, 0), str(launch.wait())
        self._bystander.until("here", count=len(self.cluster.hosts))
        self._untouched = {
            host.name: {pid for pid in host.processes() if is_bystander(pid, supervised=True)}
            for host in self.cluster.hosts
        }
        assert all(len(pids) == 2 for pids in self._untouched.values()), self._untouched

    def detach(self, file: Path) -> str:
        """Launch the job in the background. Returns the run's name."""
        launch = self.start(file, "--detach")
        done = launch.wait()
        assert done.code == 0, str(done)
        return done.stdout.strip()

    def command(self, *argv: str, **options: Any) -> Launch:
        launch = self.launcher.command(*argv, **options)
        self._launches.append(launch)
        return launch

    def steps(self) -> list[int]:
        """The last step of each rank."""
        return [self.step(rank) for rank in range(len(self.cluster.hosts))]

    def step(self, rank: int) -> int:
        try:
            return int((self.folder / f"step-{rank}").read_text() or 0)
        except OSError:
            return 0

    def advance(self, steps: int = 10) -> None:
        """Wait until every rank has done ``steps`` more steps."""
        reached = [each + steps for each in self.steps()]
        until(
            lambda: all(now >= aim for now, aim in zip(self.steps(), reached, strict=True)),
            f"{steps} more steps of each rank",
        )

    def stop(self) -> None:
        (self.folder / "stop").touch()

    # What there is of it -----------------------------------------------------------------------

    @property
    def run(self) -> Path:
        """The run's folder on this machine."""
        (run,) = (self.launcher.home / "runs").glob("test-*")
        return run

    def in_charge(self) -> int | None:
        """The process that is in charge of the run, if there is one."""
        return RunFolder(self.run).in_charge()

    def stop_leftovers(self) -> None:
        """`dtrain stop` again, until it reaches all hosts: a busy machine may take longer than
        `restart.node_timeout`."""
        stopped = lambda: self.command("stop", self.run.name).wait().code == 0  # noqa: E731
        until(stopped, "the end of the leftovers")

    def kill_launcher(self) -> None:
        pid = self.in_charge()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        until(lambda: self.in_charge() != pid, "the launcher's end")

    def on_node(self, host: Host, name: str) -> bytes:
        """The content of a worker's file on its host."""
        folder = host.home / ".dtrain" / "nodes" / self.run.name / host.name
        if name.startswith("rank-"):
            stream = "stdout.log" if name.endswith(".out") else "stderr.log"
            (path,) = folder.glob(f"*.ranks/*/attempt_0/*/{stream}")
            return path.read_bytes()
        return (folder / name).read_bytes()

    def here(self, host: Host, name: str) -> bytes:
        """The part of it that has arrived on this machine."""
        return (self.run / "logs" / host.name / name).read_bytes()

    # What must hold ----------------------------------------------------------------------------

    def over(self, launch: Launch, code: int, timeout: float = HANG) -> Done:
        """Wait for a command's end, which has to be this one, and without a traceback of ours."""
        done = launch.wait(timeout)
        assert done.code == code, str(done)
        return done

    def check(self, *, whole: bool = True, role: str = "worker") -> None:
        """No byte lost or doubled, and as `check_hosts`. ``whole``: no rank ended in mid-step."""
        for rank, host in enumerate(self.cluster.hosts):
            for suffix in ("out", "err"):
                name = f"{role}-{rank}.{suffix}"
                written = self.on_node(host, name)
                assert_same(self.here(host, name), written, f"{name}, here and there")
                # Python's own error about a full disk follows the job's output.
                lines = written.partition(b"Traceback")[0]
                wanted = first_bytes(suffix, rank, len(lines), self.size)
                assert_same(lines, wanted, f"{name}, written and expected")
                if whole:
                    last = step(suffix, rank, self.step(rank), self.size)
                    assert written.endswith(last), f"{name} ends before its rank did"
        self.check_hosts()

    def check_hosts(self) -> None:
        """No process left, no traceback, and nothing touched that is not of this run."""
        self.until_nothing_is_left()
        for launch in self._launches:
            ours = [line for line in launch.stderr.splitlines() if line.startswith("Traceback")]
            assert not ours, launch.stderr
        assert not (self.run / "fault.txt").exists(), (self.run / "fault.txt").read_text()
        assert self._bystander.process.poll() is None, str(self._bystander.wait())
        for host in self.cluster.hosts:
            untouched = self._untouched.get(host.name, set())
            assert untouched <= host.processes().keys(), host.name

    def until_nothing_is_left(self, *hosts: Host) -> None:
        """On these hosts, or on any: neither of the job, nor, when no connection is left, relays.

        One that was cut off notices within the minute.
        """
        until(lambda: not self.left(list(hosts), relays=False), "the end of the job")
        until(lambda: not self.left(list(hosts)), "the end of the relays")

    def left(
        self, hosts: list[Host] | None = None, *, relays: bool = True
    ) -> dict[str, dict[int, str]]:
        """The processes of the job on any host."""
        found = {
            host.name: {
                pid: line
                for pid, line in host.processes().items()
                if not is_bystander(pid)
                and BYSTANDER not in line
                and (relays or "dtrain-agent" not in line)
            }
            for host in hosts or self.cluster.hosts
        }
        return {host: processes for host, processes in found.items() if processes}


def is_bystander(pid: int, *, supervised: bool = False) -> bool:
    try:
        return f"DTRAIN_RUN_ID={BYSTANDER}".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return not supervised  # it has ended


def first_bytes(name: str, rank: int, count: int, size: int) -> bytes:
    """The first bytes that a rank of the job writes to ``out`` or ``err``."""
    parts: list[bytes] = []
    for number in itertools.count(1):
        if count <= 0:
            break
        parts.append(step(name, rank, number, size)[:count])
        count -= len(parts[-1])
    return b"".join(parts)


def assert_same(one: bytes, other: bytes, what: str) -> None:
    """As ``assert one == other``, without megabytes in the message."""
    if one != other:
        pairs = zip(one, other, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
        around = one[max(0, at - 30) : at + 30], other[max(0, at - 30) : at + 30]
        raise AssertionError(f"{what}: {len(one)} and {len(other)} bytes, from {at}: {around}")
