"""Runs the real `dtrain launch` as a process and checks what it leaves behind."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.limits import HANG
from support.warm import Process, dtrain

JOBS = Path(__file__).resolve().parents[1] / "jobs"
FAKES = JOBS.with_name("checks") / "fakes"
PATIENCE = HANG
IDLE = {"OMP_WAIT_POLICY": "PASSIVE"}
"""For processes with a thread for each core. On a busy machine, threads that wait would otherwise
use more of it than those that compute."""


def torch_of(request: pytest.FixtureRequest) -> dict[str, str]:
    """The environment of a job: a fake torch, unless the test is marked ``torch``. The real one
    takes the check of each host seconds to import."""
    real = request.node.get_closest_marker("torch") is not None
    return IDLE if real else {"PYTHONPATH": str(FAKES / "torch-2.13.0")}


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

    def __init__(self, process: subprocess.Popen[bytes] | Process) -> None:
        self.process = process
        self._begun = time.monotonic()
        self._changed = threading.Condition()
        self._output = {"stdout": bytearray(), "stderr": bytearray()}
        self._readers = [
            threading.Thread(target=self._read, args=(name,), name=name, daemon=True)
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
            return self.count(text) >= count or not any(r.is_alive() for r in self._readers)

        deadline = time.monotonic() + timeout
        with self._changed:
            # Poll: no event reports that a reader has ended.
            while not settled() and time.monotonic() < deadline:
                self._changed.wait(0.2)
        found = self.count(text)
        assert found >= count, f"{text!r} {found} times:\n{self.stdout}\n{self.stderr}"

    def count(self, text: str) -> int:
        """How often ``text`` has been written, on stdout and stderr together."""
        return sum(output.count(text.encode()) for output in self._output.values())

    def drain(self, pipe: int, timeout: float = PATIENCE) -> bytes:
        """Read a pipe that the command writes to until it has no writer, and close it."""
        chunks = []
        deadline = time.monotonic() + timeout
        with open(pipe, "rb", buffering=0) as reading:
            while (left := deadline - time.monotonic()) > 0:
                if select.select([reading], [], [], left)[0]:
                    if not (data := reading.read(1 << 16)):
                        return b"".join(chunks)
                    chunks.append(data)
        pytest.fail(f"still written to after {timeout:g} s:\n{self.stderr}")

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, timeout: float = PATIENCE) -> Done:
        """Wait for its end. On a timeout, kills it and fails the test."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            pytest.fail(f"no end after {timeout} s:\n{self.stdout}\n{self.stderr}")
        seconds = time.monotonic() - self._begun
        for reader in self._readers:
            # Another process may keep the pipe open. What has been written is read in any case.
            pipe = getattr(self.process, reader.name)
            reader.join(5)
            while reader.is_alive() and select.select([pipe], [], [], 0)[0]:
                reader.join(5)
        return Done(code, self.stdout, self.stderr, seconds)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()


class Scene:
    """A folder with a cluster file, a home for runs, and a mark on all that a job starts."""

    def __init__(self, folder: Path, env: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self.env = dict(env or {})
        self.mark = f"DTRAIN_TEST_{uuid.uuid4().hex}"
        self.home = folder / "dtrain-home"
        self.nodes = folder / "nodes"
        self._launches: list[Launch] = []

    def cluster_file(
        self,
        script: str | Path,
        *,
        hosts: int = 2,
        slots: int = 2,
        name: str = "job",
        python: str = "",
        **job: Any,
    ) -> Path:
        """``hosts`` hosts of ``slots`` workers on this machine; ``python``, where not this one.
        Without a ``script``, ``job`` has another program."""
        env = {self.mark: "1"} | self.env | job.pop("env", {})
        program = {"script": str(script)} if script else {}
        document = {
            "name": name,
            "cluster": {
                "hosts": [f"node[0-{hosts - 1}]"],
                "transport": "local",
                "gpus": 0,
                "slots": slots,
                "run_dir": str(self.nodes),
                **({"python": python} if python else {}),
                "overrides": {f"node[0-{hosts - 1}]": {"address": "127.0.0.1"}},
            },
            "job": {"framework": "torch", "env": env} | program | job,
        }
        return self.write(document, name)

    def write(self, document: dict[str, Any], name: str = "job") -> Path:
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(document, allow_unicode=True))
        return path

    def script(self, text: str, name: str = "script.py") -> Path:
        path = self.folder / name
        path.write_text(text)
        return path

    def launch(
        self, cluster: Path, *flags: str, env: dict[str, str] | None = None, **options: Any
    ) -> Launch:
        return self.command("launch", str(cluster), *flags, env=env, **options)

    def command(self, *argv: str, env: dict[str, str] | None = None, **options: Any) -> Launch:
        """Any `dtrain` command; ``options`` go to Popen."""
        environment = {**os.environ, "DTRAIN_HOME": str(self.home), **(env or {})}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        if options.keys() <= pipes.keys():
            return self.adopt(dtrain(*argv, environment=environment, **{**pipes, **options}))
        command = [sys.executable, "-m", "dtrain_cli", *argv]
        quiet = {**pipes, "stdin": subprocess.DEVNULL, "env": environment}
        return self.adopt(subprocess.Popen(command, **{**quiet, **options}))

    def adopt(self, process: subprocess.Popen[bytes] | Process) -> Launch:
        """Adopt a command that was started elsewhere; it ends with the scene."""
        launch = Launch(process)
        self._launches.append(launch)
        return launch

    def run(self, cluster: Path, *options: str, env: dict[str, str] | None = None) -> Done:
        """Launch and wait for the end."""
        return self.launch(cluster, *options, env=env).wait()

    def leftovers(self) -> list[str]:
        """Command lines of the living processes with this scene's mark."""
        return [command for _, command in marked(self.mark)]

    def run_folder(self) -> Path:
        """The only run's folder."""
        (folder,) = (self.home / "runs").iterdir()
        return folder

    def close(self) -> None:
        for launch in self._launches:
            launch.kill()
        for pid, _ in marked(self.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def completed(
    *argv: str, environment: Mapping[str, str], folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """A `dtrain` command that has ended. It gets this environment alone."""
    process = dtrain(*argv, environment=environment, folder=folder, stderr=subprocess.PIPE)
    stdout, stderr = process.communicate(HANG)
    return subprocess.CompletedProcess(argv, process.wait(), stdout, stderr)


def marked(mark: str) -> list[tuple[int, str]]:
    """Process id and command line of every living process with ``mark`` in its environment."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            environment = (folder / "environ").read_bytes()
            if mark.encode() + b"=" in environment:
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                found.append((int(folder.name), command.decode(errors="replace")))
        except OSError:
            continue
    return found
