"""A job trains, and goes on, while nodes and logs get lost."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

import dtrain
from dtrain.diagnostics import ExitCode
from dtrain.engines.kubernetes import job
from support.cluster import Launcher
from support.kubernetes.cluster import Kubernetes
from support.launching import JOBS, Launch

pytestmark = [pytest.mark.kubernetes, pytest.mark.netns]

WAIT = "echo up; exec sleep 500"
NUMBERS = 'n=0; until [ -e /shared/go ]; do n=$((n + 1)); echo "line $n"; sleep 0.01; done'


class Followed:
    """Launches jobs of two pods, in which /shared is a folder of this machine."""

    def __init__(self, kubernetes: Kubernetes, launcher: Launcher) -> None:
        self.kubernetes = kubernetes
        self.launcher = launcher
        self.shared = launcher.folder / "shared"
        self.shared.mkdir()

    def launch(self, program: str = "", *, env: Any = None, **keys: Any) -> Launch:
        file = self.file(program, **keys)
        return self.launcher.command(
            "launch", str(file), env={**self.kubernetes.environment, **(env or {})}
        )

    def file(self, program: str = "", **keys: Any) -> Path:
        """``gpus`` and ``slots`` are keys of the cluster, and the other keys belong to the job."""
        section = {
            "image": "test:1",
            "host_paths": [f"{self.shared}:/shared", f"{JOBS}:/jobs:ro"],
        }
        workers = {key: keys.pop(key) for key in ("gpus", "slots") if key in keys}
        cluster = {"kubernetes": section, "nodes": 2, **(workers or {"gpus": 0, "slots": 2})}
        command = {"command": ["bash", "-c", program]} if program else {}
        job = {"framework": "none", "grace": 1, **command, **keys}
        path = self.launcher.folder / "cluster.yaml"
        path.write_text(yaml.safe_dump({"name": "test", "cluster": cluster, "job": job}))
        return path

    def pod(self, index: int) -> dict[str, Any]:
        (job,) = self.kubernetes.list("jobsets")
        return self.kubernetes.pods(job["metadata"]["name"])[index]


@pytest.fixture
def followed(kubernetes: Kubernetes, launcher: Launcher) -> Followed:
    return Followed(kubernetes, launcher)


@pytest.mark.torch
def test_two_pods_train_with_ddp(followed: Followed) -> None:
    launch = followed.launch(framework="torch", script="/jobs/ddp_torch.py", gpus=0, slots=1)
    done = launch.wait()
    assert done.code == 0, str(done)
    lines = [line.partition("] ")[2] for line in done.stdout.splitlines()]
    first, second = (json.loads(line) for line in lines if line.startswith("{"))
    assert {first["rank"], second["rank"]} == {0, 1}
    assert first["weight"] == second["weight"] == pytest.approx(3, abs=0.01)
    assert first["last"] < first["first"] / 100


def test_a_job_goes_on_after_a_lost_node(followed: Followed) -> None:
    launch = followed.launch(WAIT, restart={"max": 1})
    launch.until("] up\n", count=4)
    lost = followed.pod(1)
    name = lost["metadata"]["name"]
    followed.kubernetes.lose_node(lost["spec"]["nodeName"])
    launch.until(f"pod {name} on {lost['spec']['nodeName']}; all pods start again")
    launch.until("] up\n", count=8)
    # No kubelet is left that could say why.
    again = followed.pod(1)["metadata"]["name"]
    followed.kubernetes.lose_node(followed.pod(1)["spec"]["nodeName"])
    done = launch.wait()
    assert done.code == 3, str(done)
    assert f"error: Kubernetes ended node1: pod {again} on" in done.stderr
    assert followed.kubernetes.list("pods") == []


@pytest.mark.parametrize(
    ("program", "code", "reason"),
    [
        ("echo done", ExitCode.OK, "all 4 workers finished"),
        ("[ $RANK = 2 ] && exit 7; " + WAIT, ExitCode.JOB_FAILED, "rank 2 on node1 exited with"),
    ],
)
def test_a_sidecar_that_does_not_end(
    followed: Followed, monkeypatch: pytest.MonkeyPatch, program: str, code: int, reason: str
) -> None:
    """A service mesh adds it. Kubernetes waits for all containers of a pod."""
    monkeypatch.setattr(job, "SIDECAR_SECONDS", 0.0)
    sidecar = {"name": "istio-proxy", "image": "proxy:1", "command": ["sleep", "600"]}
    followed.kubernetes.store.sidecars = [sidecar]
    file = followed.file(program)
    monkeypatch.setenv("DTRAIN_HOME", str(followed.launcher.home))
    for name, value in followed.kubernetes.environment.items():
        monkeypatch.setenv(name, value)
    report = dtrain.launch(file)
    assert report.exit_code is code
    assert report.reason.startswith(reason)
    assert followed.kubernetes.list("pods") == []


def test_lines_that_a_rotation_has_taken_are_reported(followed: Followed) -> None:
    launch = followed.launch(NUMBERS)
    launch.until("line 20\n", count=4)
    with followed.kubernetes.down():
        launch.until("trying again")
        name = followed.pod(0)["metadata"]["name"]
        before = followed.kubernetes.log(name)
        followed.kubernetes.wait("more lines", lambda: followed.kubernetes.log(name) != before)
        followed.kubernetes.rotate_log(name)
    launch.until("answers again")
    launch.until("lines are missing")
    (followed.shared / "go").touch()
    done = launch.wait()
    assert done.code == 0, str(done)
    assert "node0: lines are missing in the output: the kubelet has rotated the log" in done.stderr
    assert "node1: lines are missing" not in done.stderr


def test_a_secret_is_in_the_secret_alone(followed: Followed) -> None:
    value = "s3cr3t-s3cr3t"
    launch = followed.launch(
        "echo length ${#TOKEN}; exec sleep 500", secrets=["TOKEN"], env={"TOKEN": value}
    )
    launch.until(f"length {len(value)}\n", count=4)
    kinds = ("jobsets", "jobs", "pods", "configmaps", "services", "events", "workloads")
    assert [kind for kind in kinds if value in json.dumps(followed.kubernetes.list(kind))] == []
    assert followed.kubernetes.list("secrets") != []
    launch.send(signal.SIGINT)
    done = launch.wait()
    assert value not in done.stdout + done.stderr
    assert followed.kubernetes.list("secrets") == []
