"""The permissions that dtrain needs on Kubernetes, and whether the user has them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dtrain.engines.kubernetes.client import Client
from dtrain.messages.decode import decode

GROUPS = {
    "jobset": ("jobset.x-k8s.io", "v1alpha2", "jobsets", "JobSet"),
    "trainjob": ("trainer.kubeflow.org", "v1alpha1", "trainjobs", "Kubeflow Trainer"),
}
"""Group, version and resource of each kind of job, and the program that serves them."""


@dataclass(frozen=True, slots=True)
class Permission:
    verb: str
    resource: str
    group: str = ""
    subresource: str = ""

    @property
    def name(self) -> str:
        name = f"{self.resource}/{self.subresource}" if self.subresource else self.resource
        return f"{name}.{self.group}" if self.group else name

    def __str__(self) -> str:
        return f"{self.verb} {self.name}"


def of_launch(api: str, *, secrets: bool) -> Iterator[Permission]:
    """One for each request of a launch."""
    group, _, resource, _ = GROUPS[api]
    for verb in ("create", "get", "delete"):
        yield Permission(verb, resource, group)
    for verb in ("list", "watch", "delete"):
        yield Permission(verb, "pods")
    yield Permission("get", "pods", subresource="log")
    for name in ("configmaps", "secrets") if secrets else ("configmaps",):
        for verb in ("create", "patch", "delete"):
            yield Permission(verb, name)


OF_IMAGE_CHECK = (Permission("create", "pods"), Permission("get", "pods"))
"""Those that only `dtrain check` needs, to look into the image."""


@dataclass(frozen=True, slots=True)
class _Allowed:
    allowed: bool = False


@dataclass(frozen=True, slots=True)
class _Review:
    status: _Allowed = _Allowed()


def allowed(client: Client, permission: Permission) -> bool:
    """Whether the user has it in the namespace. Raises NodeError and ProtocolError."""
    attributes = {
        "namespace": client.namespace,
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
    return decode(_Review, answer, "review").status.allowed
