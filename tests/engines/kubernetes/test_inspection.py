"""What `dtrain check` concludes from the answers of an API server."""

from __future__ import annotations

from typing import Any

import pytest

from dtrain.checks import Finding, Severity
from dtrain.diagnostics import PrepareError
from dtrain.engines.kubernetes.client import (
    AbsentError,
    ConflictError,
    ForbiddenError,
    NotFoundError,
)
from dtrain.engines.kubernetes.inspection import KubernetesInspection
from dtrain.launchplan.build import build
from dtrain.spec.load import parse

ANY = ("v1", "v1alpha1", "v1alpha2", "v1beta1", "v1beta2")
READY = {"conditions": [{"type": "Ready", "status": "True"}]}
FORBIDDEN = ForbiddenError("server", "GET", "forbidden")


class Server:
    """Has all that a launch needs, but for ``answers`` by method and the end of the path."""

    namespace, host = "ml", "server"

    def __init__(self, answers: dict[str, dict[str, Any] | Exception]) -> None:
        self._answers = answers
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def request(self, method: str, path: str, body: Any = None, **query: Any) -> dict[str, Any]:
        self.asked.append((f"{method} {path}", query))
        for end, answer in self._answers.items():
            if f"{method} {path}".endswith(end):
                if isinstance(answer, Exception):
                    raise answer
                return answer
        if path.endswith("selfsubjectaccessreviews"):
            return {"status": {"allowed": True}}
        if path.startswith("/apis/") and path.count("/") == 2:
            return {"versions": [{"version": one} for one in ANY]}
        return {"items": []}


def findings(server: Server, kubernetes: str = "", gpus: int = 0) -> list[Finding]:
    workers = f"gpus: {gpus}" if gpus else "slots: 1"
    plan = build(
        parse(
            f"cluster: {{kubernetes: {{image: i, {kubernetes}}}, nodes: 2, {workers}}}\n"
            "job: {framework: none, command: [x]}\n",
            "job.yaml",
        )
    )
    assert plan.kubernetes is not None
    client: Any = server
    return [*KubernetesInspection(plan, client, str).findings()]


def inspect(server: Server, kubernetes: str = "", gpus: int = 0) -> list[tuple[Severity, str]]:
    return [(one.severity, one.seen) for one in findings(server, kubernetes, gpus)]


def test_the_server_judges_the_job_and_its_pods() -> None:
    why = 'pods "job-pod" is forbidden: violates PodSecurity "restricted:latest"'
    server = Server({"POST /api/v1/namespaces/{namespace}/pods": ForbiddenError("s", "POST", why)})
    assert inspect(server) == [
        (Severity.ERROR, f"the server refuses the pods of the job: {why}"),
    ]
    dry = [query for path, query in server.asked if path.endswith(("/pods", "/jobsets"))]
    assert dry == [{"dryRun": "All", "fieldValidation": "Strict"}] * 2


@pytest.mark.parametrize(
    ("end", "error", "found"),
    [
        ("POST /api/v1/namespaces/{namespace}/pods", "exceeded quota: q", []),
        (
            "/jobsets",
            'strict decoding error: unknown field "spec.x"',
            [
                (
                    Severity.ERROR,
                    'the server refuses the job: strict decoding error: unknown field "spec.x"',
                )
            ],
        ),
    ],
)
def test_refusals(end: str, error: str, found: list[Any]) -> None:
    assert inspect(Server({end: PrepareError("s", "POST", error)})) == found


def test_the_remedy_of_a_refusal_is_that_of_a_launch() -> None:
    refused = AbsentError("s", "POST", 'namespaces "x" not found', hint="set the namespace")
    (finding,) = findings(Server({"/jobsets": refused}))
    assert finding.subject == "cluster.kubernetes.namespace"
    assert finding.remedy == "set the namespace"


def test_an_object_with_the_name_of_a_dry_run_is_no_problem() -> None:
    assert inspect(Server({"/jobsets": ConflictError("s", "POST", "already exists")})) == []


def quota(hard: dict[str, str], used: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    return {"items": [{"spec": {"hard": hard, **spec}, "status": {"hard": hard, "used": used}}]}


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (quota({"pods": "10", "requests.memory": "1Ti"}), []),
        (quota({"pods": "9223372036854775807"}), []),
        (
            quota({"requests.memory": "100Gi", "cpu": "500m"}),
            [
                (Severity.ERROR, "the job needs 128Gi requests.memory, and the quota is 100Gi"),
                (Severity.ERROR, "the job needs 16 cpu, and the quota is 0.5"),
            ],
        ),
        (
            quota({"limits.cpu": "20"}, {"limits.cpu": "4500m"}),
            [(Severity.WARNING, "the job needs 16 limits.cpu; 4.5 of 20 are in use")],
        ),
        (quota({"pods": "1"}, scopes=["BestEffort"]), []),
        (quota({"pods": "1"}, scopeSelector={"matchExpressions": []}), []),
    ],
)
def test_quota(answer: dict[str, Any], found: list[Any]) -> None:
    server = Server({"/resourcequotas": answer})
    assert sorted(inspect(server, "resources: {cpu: 8, memory: 64Gi}")) == sorted(found)


def test_machines_that_the_node_selector_leaves_out_do_not_count() -> None:
    def machine(zone: str) -> dict[str, Any]:
        return {
            "metadata": {"labels": {"zone": zone}},
            "spec": {"unschedulable": None},
            "status": {"allocatable": {"nvidia.com/gpu": "8", "memory": "1e9"}, **READY},
        }

    server = Server({"GET /api/v1/nodes": {"items": [machine("a"), machine("b"), machine("a")]}})
    assert inspect(server, "node_selector: {zone: a}", gpus=8) == []
    ((severity, seen),) = inspect(server, "node_selector: {zone: b}", gpus=8)
    assert severity is Severity.WARNING
    assert seen.startswith("1 of 3 machines match the node selector and have 8 nvidia.com/gpu; ")


def test_the_machines_of_a_large_cluster_come_in_pages() -> None:
    """Each has some 20 KB, so that the list of all would be refused for its size."""

    class Paging(Server):
        def request(self, method: str, path: str, body: Any = None, **query: Any) -> dict[str, Any]:
            found = super().request(method, path, body, **query)
            if not path.endswith("/nodes"):
                return found
            start = int(query.get("continue", 0))
            end = start + query.get("limit", len(found["items"]))
            more = {"continue": str(end)} if end < len(found["items"]) else {}
            return {"metadata": more, "items": found["items"][start:end]}

    machine = {"status": {"allocatable": {"nvidia.com/gpu": "8"}, **READY}}
    server = Paging({"GET /api/v1/nodes": {"items": [{}] * 1200 + [machine] * 2}})
    assert inspect(server, gpus=8) == []
    assert sum(path.endswith("/nodes") for path, _ in server.asked) == 3


@pytest.mark.parametrize(
    ("served", "asked"),
    [
        (("v1beta1",), "v1beta1"),
        (("v1beta1", "v1beta2"), "v1beta2"),
        (("v1beta2", "v1"), "v1"),
    ],
)
def test_the_queue_is_asked_for_in_a_version_that_the_cluster_serves(
    served: tuple[str, ...], asked: str
) -> None:
    versions = {"versions": [{"version": one} for one in served]}
    server = Server({"GET /apis/kueue.x-k8s.io": versions})
    assert inspect(server, "queue: gpu") == []
    paths = [path for path, _ in server.asked if "localqueues" in path]
    kueue = "GET /apis/kueue.x-k8s.io"
    assert paths == [f"{kueue}/{asked}/namespaces/{{namespace}}/localqueues/gpu"]


@pytest.mark.parametrize("error", [FORBIDDEN, NotFoundError("server", "GET", "not found")])
def test_what_a_user_may_not_read_is_no_problem_but_what_is_missing_is(error: Exception) -> None:
    found = inspect(Server({"/priorityclasses/high": error}), "priority: high")
    assert [severity for severity, _ in found] == [Severity.ERROR] * isinstance(
        error, NotFoundError
    )


def test_permissions_on_objects_of_the_whole_cluster_are_asked_for_without_a_namespace() -> None:
    asked: list[dict[str, Any]] = []

    class Reviews(Server):
        def request(self, method: str, path: str, body: Any = None, **query: Any) -> dict[str, Any]:
            if path.endswith("selfsubjectaccessreviews"):
                asked.append(body["spec"]["resourceAttributes"])
            return super().request(method, path, body, **query)

    assert inspect(Reviews({}), "api: trainjob, queue: gpu") == []
    places = {one["resource"]: one.get("namespace") for one in asked}
    assert places["clustertrainingruntimes"] is None
    assert places["workloads"] == places["events"] == "ml"
