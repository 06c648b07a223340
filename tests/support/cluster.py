"""Launches across hosts in network namespaces: the fixtures of end-to-end tests.

A folder's conftest imports them:

    from support.cluster import hosts, launcher
    __all__ = ["hosts", "launcher"]

and a test uses them:

    def test_trains(hosts, launcher):
        cluster = hosts(2)
        file = launcher.file(cluster, {"framework": "torch", "script": job("allreduce_torch.py")})
        done = launcher.run(file)
        assert done.code == 0, str(done)
        assert launcher.left(cluster) == {}
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster import Cluster
from support.launching import JOBS, PATIENCE, Done, Launch, torch_of
from support.limits import GONE
from support.warm import dtrain


def job(name: str) -> str:
    """The path of a script in tests/jobs, the same on every host."""
    return str(JOBS / name)


class Launcher:
    """Runs the real `dtrain` command with a separate home folder.

    ``home`` is DTRAIN_HOME; what a run leaves there is in ``home / "runs"``.
    """

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        self.folder = folder
        self.env = env
        self.home = folder / "dtrain-home"
        self._launches: list[Launch] = []

    def file(
        self,
        cluster: Cluster,
        job: Mapping[str, Any],
        *,
        name: str = "cluster.yaml",
        title: str = "test",
        **section: Any,
    ) -> Path:
        """Write a cluster file: the hosts of ``cluster``, ``section`` over its keys, and a job.

        Names of its runs begin with ``title``."""
        path = self.folder / name
        own = {"env": {**self.env, **job.get("env", {})}} if job.get("framework") == "torch" else {}
        text = {"name": title, "cluster": cluster.section(**section), "job": {**job, **own}}
        path.write_text(yaml.safe_dump(text, sort_keys=False))
        return path

    def notice_silence(self, seconds: float = 10) -> None:
        """From now on a host that is silent for ``seconds`` counts as cut off, and one that does
        not answer is waited for no longer than ten. On a busy machine, hosts that work are silent
        for five."""
        ssh = self.folder / ".ssh"
        ssh.mkdir()
        interval = f"ServerAliveInterval {seconds / 2:g}"
        options = [interval, "ServerAliveCountMax 2", "ConnectTimeout 10"]
        (ssh / "config").write_text("\n  ".join(["Host *", *options]) + "\n")

    def start(
        self, file: Path | str, *args: str, env: Mapping[str, str] | None = None, **options: Any
    ) -> Launch:
        """`dtrain launch FILE ARGS…`; ``options`` are ``stdout`` and ``stderr``, as of Popen."""
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
            # Where the code under test is not the one that is installed.
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            **(env or {}),
        }
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        launch = Launch(dtrain(*argv, environment=environment, folder=self.folder, **options))
        self._launches.append(launch)
        return launch

    @staticmethod
    def left(cluster: Cluster, *, within: float = GONE) -> dict[str, dict[int, str]]:
        """The processes on the hosts after ``within`` seconds; ``{}`` as soon as there are none."""
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
    """Makes clusters of N fresh hosts (1 s for 8); all are removed after the test."""
    with contextlib.ExitStack() as stack:

        def make(count: int, **options: Any) -> Cluster:
            return stack.enter_context(Cluster(count, **options))

        yield make


@pytest.fixture
def launcher(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Launcher]:
    """Launches end with the test at the latest."""
    launcher = Launcher(tmp_path, torch_of(request))
    yield launcher
    launcher.close()
