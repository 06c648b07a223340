"""The objects of one run on the API server: creates and deletes them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from typing import Any

from dtrain.diagnostics import ConnectError, NodeError, PrepareError
from dtrain.engines.kubernetes import objects
from dtrain.engines.kubernetes.client import AbsentError, Client, ForbiddenError
from dtrain.engines.kubernetes.kinds import CORE, PODS, STRICT, TRAINJOB, job_kind, kubectl
from dtrain.launchplan.plan import LaunchPlan
from dtrain.launchplan.pods import object_name
from dtrain.messages.decode import answer_of
from dtrain.runs.record import Record
from dtrain.session.facts.everywhere import in_thread
from dtrain.session.stopping.control import Force
from dtrain.spec.model import Kubernetes
from dtrain.transport.threads import fulfil

GONE_SECONDS = 30.0
"""Seconds beyond ``job.grace`` in which deleted pods must be gone."""
STOP_POLL = 0.1
"""Seconds between two looks at requests to stop, while a request waits for its answer."""
_FILES = {"ConfigMap": f"{CORE}/configmaps", "Secret": f"{CORE}/secrets"}
"""Paths of the objects with the job's files, by kind."""


def client_of(record: Record, keys: Kubernetes) -> Client:
    """For the cluster and the namespace of a launch. Raises UsageError, see `Client`."""
    context = record.context or keys.context
    namespace = record.namespace or keys.namespace
    return Client(replace(keys, context=context, namespace=namespace))


class LaunchedJob:
    def __init__(
        self,
        client: Client,
        plan: LaunchPlan,
        asked: Callable[[], Force] = lambda: Force.NONE,
    ) -> None:
        """``asked``: the last request of the user to stop. Another one ends any wait."""
        self._client = client
        self._asked = asked
        self.name = object_name(plan.name, plan.run)
        self._kind = job_kind(plan)
        self.restarts_containers = self._kind is TRAINJOB
        """Whether a container that fails may be started again in its pod, as the runtime says."""
        self._path = f"{self._kind.path}/{self.name}"
        self.selector = f"jobset.sigs.k8s.io/jobset-name={self.name}"
        self._files = {
            kind: path for kind, path in _FILES.items() if kind != "Secret" or plan.job.secrets
        }
        self._grace = plan.job.grace
        self._unanswered: list[Future[dict[str, Any]]] = []
        """Requests that the server may still handle."""
        self.problem = ""
        """Why objects of a job that could not be created may still be there."""

    @property
    def answer(self) -> str:
        """What is waited for while a request is under way."""
        return f"the API server {self._client.host} to answer"

    @property
    def still_there(self) -> str:
        client, kinds = self._client, [self._kind.name, *self._files]
        left = [f"{kind.lower()}/{self.name}" for kind in kinds]
        command = kubectl("delete", *left, namespace=client.namespace, context=client.context)
        return f"{self.name} may still be there: `{command}` ends it"

    def create(self, submit: Mapping[str, Any]) -> None:
        """Create the objects by their kind, the job last. Raises NodeError, after deleting those
        that were created."""
        self.state()  # A server that does not answer has nothing to delete.
        created = False
        try:
            for kind, path in _FILES.items():
                if kind in submit:
                    self._request("POST", path, submit[kind], **STRICT)
                    created = True
            job = self._request("POST", self._kind.path, submit["job"], **STRICT)
            with answer_of(self._client.host, "creating the job"):
                uid = objects.job(job).uid
            self._own(submit["job"], uid)
        except NodeError as error:
            # After a refusal, an object of this name belongs to another run.
            if created or not isinstance(error, PrepareError):
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
        for path in self._files.values():
            change = {"metadata": {"ownerReferences": [owner]}}
            self._request("PATCH", f"{path}/{self.name}", change)

    def state(self) -> objects.KubernetesJobState | None:
        """None if there is no such job. Raises NodeError."""
        try:
            found = self._request("GET", self._path)
        except AbsentError:
            return None
        with answer_of(self._client.host, "reading the job"):
            return objects.job(found)

    def delete_job(self) -> None:
        """Ask the server to delete the job and its pods. Raises NodeError."""
        self._delete(self._path, propagationPolicy="Foreground")

    def kill_pods(self) -> None:
        """End the pods without their grace period. Raises NodeError."""
        for pod in self.pods():
            self._delete(f"{PODS}/{pod.name}", gracePeriodSeconds=0)

    def pods(self) -> tuple[objects.Pod, ...]:
        """The job's pods. Raises NodeError."""
        found = self._request("GET", PODS, labelSelector=self.selector)
        with answer_of(self._client.host, "listing the pods"):
            return objects.pods(objects.object_list(found))

    def delete_or_report(self) -> str:
        """Delete all objects, and wait until the job and its pods are gone. The problem; empty
        without one."""
        deadline = time.monotonic() + self._grace + GONE_SECONDS
        problem = ""
        deleted = killed = False
        while True:
            waits = not all(one.done() for one in self._unanswered)
            try:
                if not deleted:
                    self.delete_job()
                    for path in self._files.values():
                        self._delete(f"{path}/{self.name}")
                    deleted = not waits
                if self._asked() is Force.KILL and not killed:
                    self.kill_pods()
                    killed = True
                if left := self._pods_left():
                    some = ", ".join(pod.name for pod in left[:5])
                    problem = f"pods are still there: {some}"
                elif self.state() is not None:
                    problem = f"{self._kind.name} {self.name} is still there"
                elif waits:
                    problem = f"{self._client.host} has not answered an earlier request"
                else:
                    return ""
            except NodeError as error:
                problem = error.message
            if time.monotonic() > deadline or self._asked() is Force.GIVE_UP:
                return f"{problem}\n{self.still_there}"
            time.sleep(0.3)

    def _pods_left(self) -> tuple[objects.Pod, ...]:
        try:
            return self.pods()
        except ForbiddenError:
            return ()  # The job's object goes after its pods.

    def _delete(self, path: str, **query: str | int) -> None:
        try:
            self._request("DELETE", path, None, **query)
        except AbsentError:
            return

    def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, **query: str | int
    ) -> dict[str, Any]:
        """As `Client.request`, but another request to stop does not wait for a server that accepts
        connections and does not answer: it raises ConnectError."""
        answer: Future[dict[str, Any]] = Future()
        before = self._asked()
        ask = partial(self._client.request, method, path, body, **query)
        in_thread(lambda: fulfil(answer, ask))
        while not wait([answer], STOP_POLL).done:
            if self._asked() > before:
                if method != "GET":
                    self._unanswered.append(answer)
                raise ConnectError(self._client.host, method, "no answer yet")
        return answer.result()
