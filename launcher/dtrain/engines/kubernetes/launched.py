"""The objects of one run on the API server: creates and deletes them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from dtrain.diagnostics import NodeError
from dtrain.engines.kubernetes import objects
from dtrain.engines.kubernetes.client import Client, NotFoundError
from dtrain.launchplan import names
from dtrain.launchplan.plan import LaunchPlan
from dtrain.messages.decode import ProtocolError
from dtrain.runs.record import Record

GONE_SECONDS = 30.0
"""Seconds beyond ``job.grace`` in which deleted pods must be gone."""
_CORE = "/api/v1/namespaces/{namespace}"
JOBS = {
    "jobset": "/apis/jobset.x-k8s.io/v1alpha2/namespaces/{namespace}/jobsets",
    "trainjob": "/apis/trainer.kubeflow.org/v1alpha1/namespaces/{namespace}/trainjobs",
}


class Launched:
    def __init__(self, client: Client, record: Record, plan: LaunchPlan) -> None:
        self._client = client
        self.name = names.object_name(plan.name, record.run)
        keys = plan.kubernetes
        self._jobs = JOBS[keys.api if keys is not None else "jobset"]
        self.path = f"{self._jobs}/{self.name}"
        self.selector = f"jobset.sigs.k8s.io/jobset-name={self.name}"
        self._files = [f"{_CORE}/configmaps"]
        if plan.job.secrets:
            self._files.append(f"{_CORE}/secrets")
        self._grace = plan.job.grace
        self.created_before = record.job_id is not None
        self.problem = ""
        """Why objects of a job that could not be created may still be there."""

    @property
    def still_there(self) -> str:
        kind = self._jobs.rpartition("/")[2].removesuffix("s")
        name = f"{kind} {self.name} --namespace {self._client.namespace}"
        return f"{self.name} may still be there: `kubectl delete {name}` ends it"

    def create(self, submit: Mapping[str, Any]) -> None:
        """Create the objects by their kind, the job last. Raises NodeError, after deleting those
        that were created."""
        kinds = {"ConfigMap": f"{_CORE}/configmaps", "Secret": f"{_CORE}/secrets"}
        try:
            for kind, path in kinds.items():
                if kind in submit:
                    self._client.request("POST", path, submit[kind])
            job = self._client.request("POST", self._jobs, submit["job"])
            self._own(submit["job"], objects.job(job).uid)
        except ProtocolError as error:
            self.problem = self.delete_or_report()
            raise NodeError(self._client.host, "creating the job", str(error)) from None
        except NodeError:
            self.problem = self.delete_or_report()
            raise

    def _own(self, job: Mapping[str, Any], uid: str) -> None:
        """Make the job the owner of its files: Kubernetes then deletes them with it, even if this
        process ends first."""
        owner = {
            "apiVersion": job["apiVersion"],
            "kind": job["kind"],
            "name": self.name,
            "uid": uid,
        }
        for path in self._files:
            change = {"metadata": {"ownerReferences": [owner]}}
            self._client.request("PATCH", f"{path}/{self.name}", change)

    def is_gone(self) -> bool:
        """Whether the server does not know the job. False if it does not answer."""
        try:
            self._client.request("GET", self.path)
        except NotFoundError:
            return True
        except NodeError:
            return False
        return False

    def delete_job(self) -> None:
        """Ask the server to delete the job and its pods. Raises NodeError."""
        self._delete(self.path, propagationPolicy="Foreground")

    def kill_pods(self) -> None:
        """End the pods without their grace period. Raises NodeError."""
        for pod in self.pods():
            self._delete(f"{_CORE}/pods/{pod.name}", gracePeriodSeconds=0)

    def pods(self) -> tuple[objects.Pod, ...]:
        """The job's pods. Raises NodeError."""
        found = self._client.request("GET", f"{_CORE}/pods", labelSelector=self.selector)
        try:
            pods = [objects.pod(one) for one in objects.object_list(found).items]
        except ProtocolError as error:
            raise NodeError(self._client.host, "listing the pods", str(error)) from None
        return tuple(pod for pod in pods if pod is not None)

    def delete_or_report(self) -> str:
        """Delete all objects, and wait until no pod is left. The problem; empty without one."""
        deadline = time.monotonic() + self._grace + GONE_SECONDS
        problem = ""
        asked = False
        while True:
            try:
                if not asked:
                    self.delete_job()
                    for path in self._files:
                        self._delete(f"{path}/{self.name}")
                    asked = True
                if not (left := self.pods()):
                    return ""
                some = ", ".join(pod.name for pod in left[:5])
                problem = f"pods are still there {GONE_SECONDS:.0f} s after job.grace: {some}"
            except NodeError as error:
                problem = error.message
            if time.monotonic() > deadline:
                return f"{problem}\n{self.still_there}"
            time.sleep(0.3)

    def _delete(self, path: str, **query: str | int) -> None:
        try:
            self._client.request("DELETE", path, None, **query)
        except NotFoundError:
            return
