"""The API of the test cluster, as the official client and kubectl see it. No pod runs."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from kubernetes.client.exceptions import ApiException

import kubernetes as official
from support.kubernetes import jobset_rules
from support.kubernetes.cluster import NAME_SPACE, Kubernetes
from support.kubernetes.errors import ApiError
from support.kubernetes.kinds import Object
from support.kubernetes.manifests import jobset, trainjob

pytestmark = [pytest.mark.kubernetes, pytest.mark.netns]

JOBSETS = ("jobset.x-k8s.io", "v1alpha2", NAME_SPACE, "jobsets")


@pytest.fixture
def client(kubernetes: Kubernetes) -> Any:
    loaded = official.config.new_client_from_config(str(kubernetes.kubeconfig))
    yield loaded
    loaded.close()


def error(call: Any, *args: Any, **options: Any) -> tuple[int, str]:
    with pytest.raises(ApiException) as raised:
        call(*args, **options)
    return raised.value.status, json.loads(raised.value.body)["message"]


def test_kubectl_checks_manifests_on_the_server(kubernetes: Kubernetes) -> None:
    def apply(*manifests: Object) -> str:
        text = "\n---\n".join(json.dumps(manifest) for manifest in manifests)
        return kubernetes.kubectl("apply", "--dry-run=server", "-f", "-", stdin=text, check=False)

    secret: Object = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}}
    config: Object = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}}
    secret["stringData"], config["data"] = {"KEY": "v"}, {"train.py": "print()"}
    said = apply(jobset("true"), trainjob("true", name="other"), secret, config)
    assert said.splitlines() == [
        "jobset.jobset.x-k8s.io/train created (server dry run)",
        "trainjob.trainer.kubeflow.org/other created (server dry run)",
        "secret/s created (server dry run)",
        "configmap/c created (server dry run)",
    ]
    assert kubernetes.list("jobsets") == kubernetes.list("secrets") == []
    wrong = jobset("true", pod={"hostNetwerk": True})
    assert (
        'unknown field "spec.replicatedJobs[0].template.spec.template.spec.hostNetwerk"'
        in apply(wrong)
    )


def test_the_official_client_creates_lists_patches_and_deletes(client: Any) -> None:
    custom, core = official.client.CustomObjectsApi(client), official.client.CoreV1Api(client)
    wanted = jobset("true", suspend=True, metadata={"labels": {"app": "x"}})
    made = custom.create_namespaced_custom_object(*JOBSETS, wanted)
    assert made["metadata"]["generation"] == 1
    assert error(custom.create_namespaced_custom_object, *JOBSETS, wanted)[0] == 409
    (found,) = custom.list_namespaced_custom_object(*JOBSETS, label_selector="app in (x,y)")[
        "items"
    ]
    assert found["metadata"]["uid"] == made["metadata"]["uid"]
    assert custom.list_namespaced_custom_object(*JOBSETS, label_selector="app!=x")["items"] == []
    patched = custom.patch_namespaced_custom_object(
        *JOBSETS, "train", {"metadata": {"labels": {"app": "y"}}}
    )
    assert patched["metadata"]["labels"] == {"app": "y"}
    stale = error(custom.replace_namespaced_custom_object, *JOBSETS, "train", made)
    assert stale[0] == 409
    custom.delete_namespaced_custom_object(*JOBSETS, "train")
    assert error(custom.get_namespaced_custom_object, *JOBSETS, "train") == (
        404,
        'jobsets.jobset.x-k8s.io "train" not found',
    )
    secret = official.client.V1Secret(metadata={"name": "s"}, string_data={"A": "b"})
    assert core.create_namespaced_secret(NAME_SPACE, secret).data == {"A": "Yg=="}
    assert [node.metadata.name for node in core.list_node().items] == [
        "node1",
        "node2",
        "node3",
        "node4",
    ]


def test_a_watch_sees_each_change_and_can_go_on(client: Any, kubernetes: Kubernetes) -> None:
    core = official.client.CoreV1Api(client)
    config: Object = {"metadata": {"name": "c", "labels": {"app": "x"}}, "data": {"a": "1"}}
    listed = core.list_namespaced_config_map(NAME_SPACE)
    core.create_namespaced_config_map(NAME_SPACE, config)
    core.patch_namespaced_config_map("c", NAME_SPACE, {"data": {"a": "2"}})
    core.create_namespaced_config_map(NAME_SPACE, {"metadata": {"name": "other"}})
    core.patch_namespaced_config_map("c", NAME_SPACE, {"metadata": {"labels": {"app": "y"}}})

    def seen(version: str) -> list[str]:
        watch = official.watch.Watch()
        events = watch.stream(
            core.list_namespaced_config_map,
            NAME_SPACE,
            label_selector="app=x",
            resource_version=version,
            timeout_seconds=1,
        )
        return [event["type"] for event in events]

    assert seen(listed.metadata.resource_version) == ["ADDED", "MODIFIED", "DELETED"]
    kubernetes.end_watches(gone=True)
    with pytest.raises(ApiException) as raised:
        seen(listed.metadata.resource_version)
    assert raised.value.status == 410


def test_tokens_and_permissions(client: Any, kubernetes: Kubernetes) -> None:
    core, reviews = official.client.CoreV1Api(client), official.client.AuthorizationV1Api(client)
    kubernetes.deny("get", "pods/log")
    for sub, allowed in (("log", False), ("", True)):
        asked = {"resourceAttributes": {"verb": "get", "resource": "pods", "subresource": sub}}
        answer = reviews.create_self_subject_access_review({"spec": asked})
        assert answer.status.allowed is allowed
    kubernetes.deny("list", "pods")
    code, message = error(core.list_namespaced_pod, NAME_SPACE)
    assert code == 403
    assert message == (
        'pods is forbidden: User "test" cannot list resource "pods" in API group "" in the'
        ' namespace "ml"'
    )
    kubernetes.access.expire()
    assert error(core.list_namespaced_secret, NAME_SPACE)[0] == 401
    kubernetes.access.renew()
    again = official.config.new_client_from_config(str(kubernetes.kubeconfig))
    assert official.client.CoreV1Api(again).list_namespaced_secret(NAME_SPACE).items == []
    again.close()


def test_the_server_goes_down_and_comes_back(client: Any, kubernetes: Kubernetes) -> None:
    version = official.client.VersionApi(client)
    assert version.get_code().major == "1"
    with kubernetes.down(), pytest.raises(Exception, match=r"refused|reset|closed|Max retries"):
        version.get_code(_request_timeout=5)
    assert version.get_code().major == "1"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "a" * 45}, "pod names generated for this JobSet will exceed 63 characters"),
        ({"name": "a" * 60}, "job names generated for this JobSet will exceed 63 characters"),
        ({"name": "9gag"}, "DNS-1035 label"),
        ({"network": {"subdomain": "a" * 64}}, "subdomain is too long"),
        ({"successPolicy": {"operator": "All", "targetReplicatedJobs": ["x"]}}, "'x' does not"),
        ({"coordinator": {"replicatedJob": "x"}}, "coordinator replicatedJob x does not exist"),
        (
            {"failurePolicy": {"rules": [{"action": "FailJobSet", "onJobFailureReasons": ["x"]}]}},
            "invalid job failure reason 'x'",
        ),
    ],
)
def test_the_rules_of_jobset(change: Any, message: str) -> None:
    wanted = jobset("true", pods=100000, **change)
    jobset_rules.set_defaults(wanted)
    with pytest.raises(ApiError, match=message):
        jobset_rules.check(wanted)


def test_a_running_jobset_cannot_change() -> None:
    before = jobset("true")
    jobset_rules.set_defaults(before)
    after = copy.deepcopy(before)
    after["spec"]["suspend"] = True
    jobset_rules.check_update(before, after)
    after["spec"]["replicatedJobs"][0]["replicas"] = 2
    with pytest.raises(ApiError, match=r"spec\.replicatedJobs: Invalid value: field is immutable"):
        jobset_rules.check_update(before, after)
