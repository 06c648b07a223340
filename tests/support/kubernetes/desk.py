"""Runs dtrain on the machine of a user of the cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from support.cluster import Launcher
from support.kubernetes.cluster import Kubernetes
from support.launching import Launch

WAIT = "echo the worker waits; exec sleep 500"
COUNT = (
    'n=0; until [ -e /shared/enough ]; do n=$((n + 1)); echo "line $n"; sleep 0.01; done;'
    ' echo "end $n"'
)
"""Numbers its lines until `Desk.enough`."""


class Desk:
    def __init__(self, kubernetes: Kubernetes, launcher: Launcher) -> None:
        self.kubernetes = kubernetes
        self._launcher = launcher
        self.folder = launcher.folder

    def file(self, program: str, keys: dict[str, Any] | None = None, **job: Any) -> Path:
        section = {"image": "test:1", **(keys or {})}
        cluster = {"kubernetes": section, "nodes": 2, "gpus": 0, "slots": 2}
        job = {"framework": "none", "command": ["bash", "-c", program], "grace": 1, **job}
        path = self.folder / "cluster.yaml"
        path.write_text(yaml.safe_dump({"name": "test", "cluster": cluster, "job": job}))
        return path

    def start(self, *argv: str, **env: str) -> Launch:
        return self._launcher.command(*argv, env={**self.kubernetes.environment, **env})

    def launch(self, program: str, *options: str, **job: Any) -> Launch:
        return self.start("launch", str(self.file(program, **job)), *options)

    def log(self, rank: int, stream: str = "out") -> str:
        return self._launcher.log(f"node{rank // 2}", f"worker-{rank}.{stream}").decode()

    def pod(self, index: int) -> str:
        (job,) = self.kubernetes.list("jobsets")
        pods = self.kubernetes.pods(job["metadata"]["name"])
        return str(pods[index]["metadata"]["name"])

    @property
    def runs(self) -> list[Path]:
        return [*(self._launcher.home / "runs").iterdir()]

    def shared_file(self, program: str, keys: dict[str, Any] | None = None, **job: Any) -> Path:
        """The file of a job whose processes see what `enough` does."""
        shared = self.folder / "shared"
        shared.mkdir()
        keys = {**(keys or {}), "host_paths": [f"{shared}:/shared"]}
        return self.file(program, keys, **job)

    def count(self) -> Launch:
        return self.start("launch", str(self.shared_file(COUNT)))

    def enough(self) -> None:
        (self.folder / "shared" / "enough").touch()

    def has_each_line_once(self, rank: int) -> bool:
        *lines, end = self.log(rank).splitlines()
        expected = [f"line {number}" for number in range(1, len(lines) + 1)]
        return lines == expected and end == f"end {len(lines)}"

    def is_empty(self) -> bool:
        kinds = ("jobsets", "pods", "configmaps", "secrets")
        return not any(self.kubernetes.list(kind) for kind in kinds)
