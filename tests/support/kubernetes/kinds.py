"""The kinds that the cluster serves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Object = dict[str, Any]
"""A Kubernetes object as its JSON."""


@dataclass(frozen=True)
class Kind:
    name: str
    plural: str
    group: str = ""
    version: str = "v1"
    namespaced: bool = True

    @property
    def group_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def resource(self) -> str:
        """As error messages name it."""
        return f"{self.plural}.{self.group}" if self.group else self.plural


JOBSET = Kind("JobSet", "jobsets", "jobset.x-k8s.io", "v1alpha2")
TRAINJOB = Kind("TrainJob", "trainjobs", "trainer.kubeflow.org", "v1alpha1")
RUNTIME = Kind(
    "ClusterTrainingRuntime", "clustertrainingruntimes", "trainer.kubeflow.org", "v1alpha1", False
)
WORKLOAD = Kind("Workload", "workloads", "kueue.x-k8s.io", "v1beta1")
LOCAL_QUEUE = Kind("LocalQueue", "localqueues", "kueue.x-k8s.io", "v1beta1")
JOB = Kind("Job", "jobs", "batch")
POD = Kind("Pod", "pods")
SECRET = Kind("Secret", "secrets")
CONFIG_MAP = Kind("ConfigMap", "configmaps")
SERVICE = Kind("Service", "services")
EVENT = Kind("Event", "events")
NODE = Kind("Node", "nodes", namespaced=False)
NAMESPACE = Kind("Namespace", "namespaces", namespaced=False)
QUOTA = Kind("ResourceQuota", "resourcequotas")
CLAIM = Kind("PersistentVolumeClaim", "persistentvolumeclaims")
CRD = Kind(
    "CustomResourceDefinition", "customresourcedefinitions", "apiextensions.k8s.io", "v1", False
)
ACCESS = Kind(
    "SelfSubjectAccessReview", "selfsubjectaccessreviews", "authorization.k8s.io", "v1", False
)

CUSTOM = [JOBSET, TRAINJOB, RUNTIME, WORKLOAD, LOCAL_QUEUE]
KINDS = [
    *(POD, SECRET, CONFIG_MAP, SERVICE, EVENT, NODE, NAMESPACE, QUOTA, CLAIM, JOB, CRD, ACCESS),
    Kind("ServiceAccount", "serviceaccounts"),
    Kind("PriorityClass", "priorityclasses", "scheduling.k8s.io", "v1", False),
    *CUSTOM,
]
