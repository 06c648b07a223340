"""The permissions that dtrain needs on Kubernetes, and whether the user has them."""

from __future__ import annotations

from collections.abc import Iterator

from dtrain.engines.kubernetes import kueue
from dtrain.engines.kubernetes.client import Client
from dtrain.engines.kubernetes.kinds import JOB_KINDS, TRAINJOB
from dtrain.engines.kubernetes.objects import at
from dtrain.records import dataclass
from dtrain.spec.model import Kubernetes


@dataclass(frozen=True, slots=True)
class Permission:
    verb: str
    resource: str
    group: str = ""
    subresource: str = ""
    namespaced: bool = True

    @property
    def name(self) -> str:
        name = f"{self.resource}/{self.subresource}" if self.subresource else self.resource
        return f"{name}.{self.group}" if self.group else name

    def __str__(self) -> str:
        return f"{self.verb} {self.name}"


def of_launch(api: str, *, secrets: bool) -> Iterator[Permission]:
    """One for each request of a launch."""
    kind = JOB_KINDS[api]
    for verb in ("create", "get", "delete"):
        yield Permission(verb, kind.resource, kind.group)
    for verb in ("list", "watch", "delete"):
        yield Permission(verb, "pods")
    yield Permission("get", "pods", subresource="log")
    for name in ("configmaps", "secrets") if secrets else ("configmaps",):
        for verb in ("create", "patch", "delete"):
            yield Permission(verb, name)


def helpful(keys: Kubernetes) -> Iterator[tuple[Permission, str]]:
    """Permissions that a launch can do without, each with what is missing then."""
    yield Permission("list", "events"), "a launch does not say why pods are missing"
    for verb in ("create", "get"):  # Kubernetes 1.35 wants both
        without = "no telemetry, no runtime progress, no search for hangs, no `dtrain exec`"
        yield Permission(verb, "pods", subresource="exec"), without
    if keys.queue is not None:
        yield (
            Permission("list", "workloads", kueue.GROUP),
            "a launch says why it waits in the queue only as far as events say it",
        )
    if keys.api == "trainjob":
        yield (
            Permission("get", "clustertrainingruntimes", TRAINJOB.group, namespaced=False),
            "this check does not know what the runtime adds to the pods",
        )


OF_IMAGE_CHECK = (Permission("create", "pods"), Permission("get", "pods"))
"""Permissions that only `dtrain check` needs, to look into the image."""


def allowed(client: Client, permission: Permission) -> bool:
    """Whether the user has it in the namespace. Raises NodeError and ProtocolError."""
    attributes = {
        **({"namespace": client.namespace} if permission.namespaced else {}),
        "verb": permission.verb,
        "group": permission.group,
        "resource": permission.resource,
        **({"subresource": permission.subresource} if permission.subresource else {}),
    }
    answer = client.request(
        "POST",
        "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews",
        {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        },
    )
    return at(answer, "status.allowed", bool) or False
