"""Runs the real `dtrain launch` as a process and looks at what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

JOBS = Path(__file__).parent.parent / "jobs"
PATIENCE = 60.0


def until(condition: Callable[[], object], what: str, patience: float = PATIENCE) -> None:
    """Wait for something that no event tells of; fail the test if it does not come."""
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, f"waited {patience:g} s in vain for {what}"
        threading.Event().wait(0.02)


class Scene:
    """A folder with a cluster file, a home for runs, and a mark on all that a job starts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = f"DTRAIN_TEST_{uuid.uuid4().hex}"
        self.home = folder / "dtrain-home"
        self.nodes = folder / "nodes"
        self._launches: list[Launch] = []

    def cluster_file(
        self, script: str | Path, *, hosts: int = 2, slots: int = 2, name: str = "job", **job: Any
    ) -> Path:
        """``hosts`` hosts of ``slots`` workers on this machine."""
        env = {self.mark: "1"} | job.pop("env", {})
        document = {
            "name": name,
            "cluster": {
                "hosts": [f"node[0-{hosts - 1}]"],
                "transport": "local",
                "gpus": 0,
                "slots": slots,
                "run_dir": str(self.nodes),
                "overrides": {f"node[0-{hosts - 1}]": {"address": "127.0.0.1"}},
            },
            "job": {"framework": "torch", "script": str(script), "env": env} | job,
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
        self, cluster: Path, *options: str, env: dict[str, str] | None = None, **popen: Any
    ) -> Launch:
        launch = Launch(
            ["launch", str(cluster), *options],
            env={**os.environ, "DTRAIN_HOME": str(self.home), **(env or {})},
            **popen,
        )
        self._launches.append(launch)
        return launch

    def run(self, cluster: Path, *options: str, env: dict[str, str] | None = None) -> Launch:
        """Launch and wait for the end."""
        launch = self.launch(cluster, *options, env=env)
        launch.wait()
        return launch

    def leftovers(self) -> list[str]:
        """Command lines of the living processes that bear this scene's mark."""
        return [command for _, command in marked(self.mark)]

    def run_folder(self) -> Path:
        """The only run's folder."""
        (folder,) = (self.home / "runs").iterdir()
        return folder

    def close(self) -> None:
        for launch in self._launches:
            launch.close()
        for pid, _ in marked(self.mark):
            os.kill(pid, signal.SIGKILL)


class Launch:
    """A running `dtrain`, with its output collected as it comes."""

    def __init__(self, arguments: Sequence[str], env: dict[str, str], **popen: Any) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dtrain_cli", *arguments],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=popen.pop("stdout", subprocess.PIPE),
            stderr=popen.pop("stderr", subprocess.PIPE),
            **popen,
        )
        self.pid = self._process.pid
        self._parts: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
        self._grown = threading.Condition()
        self._readers = [
            threading.Thread(target=self._read, args=(name, pipe), daemon=True)
            for name, pipe in (("stdout", self._process.stdout), ("stderr", self._process.stderr))
            if pipe is not None
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, name: str, pipe: Any) -> None:
        while part := os.read(pipe.fileno(), 1 << 16):
            with self._grown:
                self._parts[name].append(part)
                self._grown.notify_all()
        with self._grown:
            self._grown.notify_all()

    @property
    def stdout(self) -> str:
        return b"".join(self._parts["stdout"]).decode(errors="replace")

    @property
    def stderr(self) -> str:
        return b"".join(self._parts["stderr"]).decode(errors="replace")

    @property
    def output(self) -> str:
        return self.stdout + self.stderr

    def until_said(self, text: str, times: int = 1) -> None:
        """Wait until ``text`` has been printed so often."""
        deadline = time.monotonic() + PATIENCE
        with self._grown:
            while self.output.count(text) < times:
                left = deadline - time.monotonic()
                assert left > 0, f"not said: {text!r}\n{self.output}"
                assert self._process.poll() is None or self._grown.wait(1), self.output
                self._grown.wait(min(left, 1))

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait(self, patience: float = PATIENCE) -> int:
        """The exit code, when everything has been read."""
        code = self._process.wait(patience)
        for reader in self._readers:
            reader.join(patience)
        return code

    @property
    def code(self) -> int:
        return self.wait()

    def events(self) -> list[dict[str, Any]]:
        """What ``--json`` printed."""
        return [json.loads(line) for line in self.stdout.splitlines()]

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for reader in self._readers:
            reader.join(5)
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()


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
