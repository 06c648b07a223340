"""The kinds of objects on the API server that dtrain uses. Pure."""

from __future__ import annotations

from dtrain.launchplan.plan import LaunchPlan
from dtrain.quoting import words
from dtrain.records import dataclass
from dtrain.spec.model import Kubernetes

CORE = "/api/v1/namespaces/{namespace}"
"""Path of the objects that belong to Kubernetes itself."""
PODS = f"{CORE}/pods"
EVENTS = f"{CORE}/events"
STRICT = {"fieldValidation": "Strict"}
"""Refuses fields that an older JobSet or Trainer would drop."""


@dataclass(frozen=True, slots=True)
class JobKind:
    name: str
    group: str
    version: str
    resource: str
    """The name in paths and permissions."""
    program: str
    """What serves it."""

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}"

    @property
    def path(self) -> str:
        return f"/apis/{self.api_version}/namespaces/{{namespace}}/{self.resource}"


JOBSET = JobKind("JobSet", "jobset.x-k8s.io", "v1alpha2", "jobsets", "JobSet")
TRAINJOB = JobKind("TrainJob", "trainer.kubeflow.org", "v1alpha1", "trainjobs", "Kubeflow Trainer")
JOB_KINDS = {"jobset": JOBSET, "trainjob": TRAINJOB}
"""By the value of ``cluster.kubernetes.api``."""


def kubectl(*arguments: str, namespace: str | None = None, context: str | None = None) -> str:
    """A command for the user, even if they have switched to another namespace or context."""
    named = (("--namespace", namespace), ("--context", context))
    options = [part for name, value in named if value for part in (name, value)]
    return str(words(["kubectl", *arguments, *options]))


def keys_of(plan: LaunchPlan) -> Kubernetes:
    """What the plan's job asks of Kubernetes. ``plan.kubernetes`` must be set."""
    assert plan.kubernetes is not None  # noqa: S101 (types)
    return plan.kubernetes


def job_kind(plan: LaunchPlan) -> JobKind:
    """The kind of the plan's job."""
    return JOB_KINDS[keys_of(plan).api]
