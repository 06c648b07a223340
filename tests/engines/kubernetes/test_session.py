"""What is asked about a run that no process follows, and of which cluster."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dtrain.diagnostics import ConnectError, NodeError
from dtrain.engines.kubernetes import launched, session
from dtrain.engines.kubernetes.client import AbsentError
from dtrain.engines.kubernetes.objects import INDEX_LABEL, RESTART_LABEL
from dtrain.engines.kubernetes.session import KubernetesEngine
from dtrain.runs.folder import RunFolder
from dtrain.runs.record import Record
from dtrain.runs.request import Request
from dtrain.runs.status import HostStatus
from dtrain.session.caller import Caller
from dtrain.spec.model import Kubernetes

FILE = """
cluster: {kubernetes: {image: i}, nodes: 2, slots: 1}
job: {framework: none, command: [x]}
"""
KNOWN = {"node0": HostStatus("running", 5.0), "node1": HostStatus("running", 6.0)}
JOB = {"metadata": {"name": "c-1"}}


def pod(index: int, attempt: int, created: str, **status: Any) -> dict[str, Any]:
    labels = {INDEX_LABEL: str(index), RESTART_LABEL: str(attempt - 1)}
    metadata = {"name": f"p-{index}", "labels": labels, "creationTimestamp": created}
    return {"metadata": metadata, "spec": {"nodeName": "m"}, "status": status}


RUNS: dict[str, Any] = {"containerStatuses": [{"name": "node", "state": {"running": {}}}]}


class Server:
    """Answers about the job, and lists pods. Has the keys of its last client."""

    host, namespace, context = "server", "ml", "prod"
    keys: Kubernetes

    def __init__(self, job: dict[str, Any] | NodeError, *pods: dict[str, Any]) -> None:
        self._job = job
        self._pods = pods

    def client(self, keys: Kubernetes) -> Server:
        self.keys = keys
        return self

    def request(self, method: str, path: str, body: Any = None, **query: Any) -> dict[str, Any]:
        if path.endswith("/pods") and not isinstance(self._job, ConnectError):
            return {"items": list(self._pods)}
        if isinstance(self._job, NodeError):
            raise self._job
        job = self._job
        if method == "DELETE":
            self._job = AbsentError(self.host, "GET", "deleted")
        return job


Engine = Callable[..., KubernetesEngine]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Engine:
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))

    def new(server: Server, text: str = FILE) -> KubernetesEngine:
        for module in (session, launched):
            monkeypatch.setattr(module, "Client", server.client)
        request = Request("c.yaml", "/", text)
        return KubernetesEngine(request, Caller())

    return new


def record(**fields: Any) -> Record:
    return Record("run-1", Request("c.yaml", "/", FILE), 29500, "python3", 1e9, **fields)


@pytest.mark.parametrize(
    ("server", "expected"),
    [
        (Server(JOB, pod(0, 1, "a", **RUNS)), {"node0": ("running", 5.0), "node1": ("queued",)}),
        (
            Server(JOB, pod(0, 2, "b", **RUNS), pod(0, 1, "a", phase="Failed")),
            {"node0": ("running", 5.0), "node1": ("queued",)},
        ),
        (
            Server(JOB, pod(0, 1, "b", **RUNS), pod(0, 1, "a", phase="Failed")),
            {"node0": ("running", 5.0), "node1": ("queued",)},
        ),
        (
            Server({**JOB, "status": {"conditions": [{"type": "Completed", "status": "True"}]}}),
            {"node0": ("ended",), "node1": ("ended",)},
        ),
        (Server(AbsentError("server", "GET", "x")), {"node0": ("gone",), "node1": ("gone",)}),
        (
            Server(ConnectError("server", "GET", "refused")),
            {"node0": ("unreachable",), "node1": ("unreachable",)},
        ),
    ],
)
def test_the_state_of_each_host(
    engine: Engine, server: Server, expected: dict[str, tuple[Any, ...]]
) -> None:
    found = engine(server).status(record(), KNOWN)
    for host, (word, *since) in expected.items():
        assert found[host].state == word
        assert not since or found[host].since == since[0]


def test_files_that_are_not_sent_are_named(engine: Engine, tmp_path: Path) -> None:
    source = tmp_path / "src"
    source.mkdir()
    os.mkfifo(source / "pipe")
    text = FILE.replace("[x]", f"[x], sync: {{source: {source}}}")
    report = engine(Server(ConnectError("server", "GET", "refused")), text).run({})
    journal = RunFolder.find(report.run).journal.read_text()
    assert "not sent, because they are sockets, pipes or devices: pipe" in journal


def test_a_run_stays_in_the_context_and_the_namespace_of_its_launch(engine: Engine) -> None:
    """The user may switch to others: `dtrain stop` must not look there."""
    refusing = Server(ConnectError("server", "GET", "refused"))
    report = engine(refusing).run({})
    launched = Record.load(RunFolder.find(report.run).path)
    assert (launched.context, launched.namespace) == ("prod", "ml")
    later = Server(JOB)
    engine(later).status(launched, KNOWN)
    assert (later.keys.context, later.keys.namespace) == ("prod", "ml")
    assert engine(later).clean(launched, RunFolder.find(report.run))
    assert (later.keys.context, later.keys.namespace) == ("prod", "ml")
