"""Launches across hosts in network namespaces: the fixtures of end-to-end tests.

A folder's conftest takes them by import:

    from support.cluster import hosts, launcher
    __all__ = ["hosts", "launcher"]

and a test then reads:

    def test_trains(hosts, launcher):
        cluster = hosts(2)
        file = launcher.file(cluster, {"framework": "torch", "script": job("allreduce_torch.py")})
        done = launcher.run(file)
        assert done.code == 0, done
        assert launcher.left(cluster) == {}
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster import Cluster

JOBS = Path(__file__).resolve().parents[1] / "jobs"
PATIENCE = 90.0


def job(name: str) -> str:
    """The path of a script in tests/jobs, the same on every host."""
    return str(JOBS / name)


@dataclass(frozen=True)
class Done:
    """A launch that has ended."""

    code: int
    """Exit status; negative for a signal."""
    stdout: str
    stderr: str
    seconds: float

    def __str__(self) -> str:
        return f"status {self.code} after {self.seconds:.1f} s\n{self.stdout}\n{self.stderr}"

    def lines(self, host: str, label: object) -> list[str]:
        """What one worker wrote to stdout, as it was shown."""
        prefix = f"[{host} {label}] "
        return [
            line.removeprefix(prefix)
            for line in self.stdout.splitlines()
            if line.startswith(prefix)
        ]


class Launch:
    """A `dtrain` command under way."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self._begun = time.monotonic()
        self._changed = threading.Condition()
        self._output = {"stdout": b"", "stderr": b""}
        self._readers = [
            threading.Thread(target=self._read, args=(name,), daemon=True)
            for name in self._output
            if getattr(process, name) is not None
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, name: str) -> None:
        pipe = getattr(self.process, name)
        while data := os.read(pipe.fileno(), 1 << 16):
            with self._changed:
                self._output[name] += data
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    @property
    def stdout(self) -> str:
        return self._output["stdout"].decode(errors="replace")

    @property
    def stderr(self) -> str:
        return self._output["stderr"].decode(errors="replace")

    def until(self, text: str, *, count: int = 1, timeout: float = PATIENCE) -> None:
        """Wait until ``text`` has been written ``count`` times, on stdout and stderr together."""

        def settled() -> bool:
            return self._count(text) >= count or not any(r.is_alive() for r in self._readers)

        deadline = time.monotonic() + timeout
        with self._changed:
            # A reader that ends is seen by looking, not by being told.
            while not settled() and time.monotonic() < deadline:
                self._changed.wait(0.2)
        found = self._count(text)
        assert found >= count, f"{text!r} {found} times:\n{self.stdout}\n{self.stderr}"

    def _count(self, text: str) -> int:
        return self.stdout.count(text) + self.stderr.count(text)

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, timeout: float = PATIENCE) -> Done:
        """Wait for its end. Fails the test, and kills it, when there is none in time."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            pytest.fail(f"no end after {timeout} s:\n{self.stdout}\n{self.stderr}")
        seconds = time.monotonic() - self._begun
        for reader in self._readers:
            reader.join(5)
        return Done(code, self.stdout, self.stderr, seconds)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()


class Launcher:
    """Runs the real `dtrain` command with a home folder of its own.

    ``home`` is DTRAIN_HOME; what a run leaves there is in ``home / "runs"``.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "dtrain-home"
        self._launches: list[Launch] = []

    def file(
        self,
        cluster: Cluster,
        job: Mapping[str, Any],
        *,
        name: str = "cluster.yaml",
        **section: Any,
    ) -> Path:
        """Write a cluster file: the hosts of ``cluster``, ``section`` over its keys, and a job."""
        path = self.folder / name
        text = {"name": "test", "cluster": cluster.section(**section), "job": dict(job)}
        path.write_text(yaml.safe_dump(text, sort_keys=False))
        return path

    def start(
        self, file: Path | str, *args: str, env: Mapping[str, str] | None = None, **options: Any
    ) -> Launch:
        """`dtrain launch FILE ARGS…`; ``options`` go to Popen (``stdout``, say)."""
        return self.command("launch", str(file), *args, env=env, **options)

    def run(
        self,
        file: Path | str,
        *args: str,
        env: Mapping[str, str] | None = None,
        timeout: float = PATIENCE,
    ) -> Done:
        """`start`, then wait."""
        return self.start(file, *args, env=env).wait(timeout)

    def command(self, *argv: str, env: Mapping[str, str] | None = None, **options: Any) -> Launch:
        """Any `dtrain` command."""
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.folder),
            "DTRAIN_HOME": str(self.home),
            "LANG": "C.UTF-8",
            **(env or {}),
        }
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        process = subprocess.Popen(
            [str(Path(sys.executable).with_name("dtrain")), *argv],
            stdin=subprocess.DEVNULL,
            env=environment,
            cwd=self.folder,
            **options,
        )
        launch = Launch(process)
        self._launches.append(launch)
        return launch

    @staticmethod
    def left(cluster: Cluster, *, within: float = 5.0) -> dict[str, dict[int, str]]:
        """What still runs on the hosts after ``within`` seconds; ``{}`` as soon as nothing does."""
        deadline = time.monotonic() + within
        while True:
            left = {host.name: found for host in cluster.hosts if (found := host.processes())}
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.05)

    def log(self, host: str, name: str) -> bytes:
        """The stored bytes of one stream (``worker-0.out``) of the only run so far."""
        (run,) = (self.home / "runs").iterdir()
        return (run / "logs" / host / name).read_bytes()

    def close(self) -> None:
        for launch in self._launches:
            launch.kill()


@pytest.fixture
def hosts() -> Iterator[Callable[..., Cluster]]:
    """Makes clusters of N fresh hosts (1 s for 8); all of them are gone after the test."""
    with contextlib.ExitStack() as stack:

        def make(count: int, **options: Any) -> Cluster:
            return stack.enter_context(Cluster(count, **options))

        yield make


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    """Launches end with the test at the latest."""
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.close()
