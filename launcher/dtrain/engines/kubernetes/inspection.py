"""`dtrain check` on Kubernetes: asks the API server what a launch would need."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dtrain.checks import Evidence, Finding, Severity
from dtrain.checks.finding import error, warning
from dtrain.diagnostics import NodeError, PrepareError
from dtrain.engines.kubernetes import kueue, manifest, permissions, training_runtime
from dtrain.engines.kubernetes.client import AbsentError, Client, ConflictError, NotFoundError
from dtrain.engines.kubernetes.image_check import ImageCheck
from dtrain.engines.kubernetes.kinds import CORE, JOB_KINDS, PODS, STRICT, keys_of
from dtrain.engines.kubernetes.machines import left_out, machines
from dtrain.engines.kubernetes.objects import Word, at, object_list
from dtrain.engines.kubernetes.quantities import amount, written
from dtrain.launchplan.build import build
from dtrain.launchplan.plan import LaunchPlan
from dtrain.messages.decode import answer_of
from dtrain.runs.request import Request
from dtrain.session.facts.everywhere import everywhere

DELETION_SECONDS = 10.0
"""Seconds after Ctrl-C for the deletion of the check's pod."""


def examine(request: Request, stopped: Callable[[], bool]) -> Evidence:
    """The evidence of a file with `cluster.kubernetes`. Raises UsageError without a kubeconfig. For
    ``stopped`` see `everywhere`."""
    plan = build(request.spec())
    over = threading.Event()
    try:
        (found,) = everywhere(
            lambda _part: _examine(request, plan, lambda: stopped() or over.is_set()),
            plan.hosts[:1],
            math.inf,
            stopped=stopped,
            ending=DELETION_SECONDS,
        )
    finally:
        over.set()
    if isinstance(found, NodeError):
        return Evidence.without_hosts(plan, failures=[found])
    return found


def _examine(request: Request, plan: LaunchPlan, stopped: Callable[[], bool]) -> Evidence:
    keys = keys_of(plan)
    client = Client(keys)
    with answer_of(client.host, "checking the cluster"):
        client.request("GET", "/version")
        found = [*KubernetesInspection(plan, client, request.place).findings()]
        if not stopped() and not any(one.severity is Severity.ERROR for one in found):
            runtime = training_runtime.read(client, keys)
            found += ImageCheck(plan, client, request.place, runtime, stopped).findings()
    return Evidence.without_hosts(plan, request=found)


class KubernetesInspection:
    """Compares one file with one cluster. Raises NodeError and ProtocolError."""

    def __init__(self, plan: LaunchPlan, client: Client, place: Callable[[str], str]) -> None:
        self._plan = plan
        self._keys = keys_of(plan)
        self._client = client
        self._place = place

    def findings(self) -> Iterator[Finding]:
        missing = [*self._kinds()]
        denied = [*self._denied()]
        references = [*self._references()]
        yield from (*missing, *denied, *references)
        yield from self._not_helped()
        if not missing and not denied and not references:
            yield from self._refused()
        yield from self._gpus()
        yield from self._quota()

    def _error(self, key: str, seen: str, expected: str, remedy: str) -> Finding:
        path = f"cluster.{key}"
        return error(path, [self._client.host], seen, expected, remedy, self._place(path))

    def _kinds(self) -> Iterator[Finding]:
        kind = JOB_KINDS[self._keys.api]
        try:
            versions = kueue.versions(self._client, kind.group)
        except NotFoundError:
            yield self._error(
                "kubernetes.api",
                f"the cluster does not know {kind.resource}.{kind.group}",
                f"{kind.program} is installed",
                f"ask the administrator to install {kind.program}, or use another api",
            )
            return
        if kind.version not in versions:
            yield self._error(
                "kubernetes.api",
                f"{kind.group} has the versions {', '.join(versions) or 'none'}",
                kind.api_version,
                f"ask the administrator for a {kind.program} that serves {kind.version}",
            )

    def _denied(self) -> Iterator[Finding]:
        secrets = bool(self._plan.job.secrets)
        for asked in permissions.of_launch(self._keys.api, secrets=secrets):
            if not permissions.allowed(self._client, asked):
                yield self._error(
                    "kubernetes.namespace",
                    f"you may not {asked} in the namespace {self._client.namespace}",
                    f"the permission to {asked}",
                    f"ask the administrator for a Role with the verb {asked.verb} on {asked.name}",
                )

    def _not_helped(self) -> Iterator[Finding]:
        for asked, lost in permissions.helpful(self._keys):
            if not permissions.allowed(self._client, asked):
                where = f" in the namespace {self._client.namespace}" if asked.namespaced else ""
                role = "Role" if asked.namespaced else "ClusterRole"
                yield warning(
                    "permissions",
                    [self._client.host],
                    f"you may not {asked}{where}: {lost}",
                    f"the permission to {asked}",
                    f"ask the administrator for a {role} with the verb {asked.verb} on"
                    f" {asked.name}",
                    self._place("cluster.kubernetes.namespace"),
                )

    def _references(self) -> Iterator[Finding]:
        """Objects that the file names and the cluster does not have."""
        keys = self._keys
        queues = ""
        if keys.queue is not None:
            try:
                queues = f"{kueue.served_path(self._client)}/localqueues"
            except PrepareError as failure:
                yield self._error(
                    "kubernetes.queue",
                    f"the cluster has no queues: {failure.reason}",
                    f"Kueue is installed, with {kueue.GROUP}/"
                    + " or ".join(reversed(kueue.KNOWN_VERSIONS)),
                    "remove cluster.kubernetes.queue, or ask the administrator to install Kueue",
                )
        named = [
            *(
                ("claims", f"{CORE}/persistentvolumeclaims", one.partition(":")[0])
                for one in keys.claims
            ),
            *(("pull_secrets", f"{CORE}/secrets", one) for one in keys.pull_secrets),
            ("service_account", f"{CORE}/serviceaccounts", keys.service_account),
            ("priority", "/apis/scheduling.k8s.io/v1/priorityclasses", keys.priority),
            ("queue", queues, keys.queue if queues else None),
            ("runtime", training_runtime.PATH, keys.runtime if keys.api == "trainjob" else None),
        ]
        for key, path, name in named:
            if name is None:
                continue
            kind = path.rpartition("/")[2]
            try:
                self._client.request("GET", f"{path}/{name}")
            except NotFoundError:
                yield self._error(
                    f"kubernetes.{key}",
                    f"there is no {name} among the {kind} of the cluster",
                    f"{kind} has {name}",
                    f"`kubectl get {kind}` lists them; set cluster.kubernetes.{key}",
                )
            except PrepareError:
                continue  # Users need not be allowed to read it.

    def _refused(self) -> Iterator[Finding]:
        """What the server says to the job itself and to its pods, without creating them."""
        requests = [("job", JOB_KINDS[self._keys.api].path, manifest.job(self._plan))]
        create_pods = permissions.OF_IMAGE_CHECK[0]
        if self._keys.api == "jobset" and permissions.allowed(self._client, create_pods):
            requests.append(("pods of the job", PODS, manifest.pod(self._plan)))
        for what, path, body in requests:
            try:
                self._client.request("POST", path, body, dryRun="All", **STRICT)
            except ConflictError:
                continue  # The object of a dry run that a user has applied.
            except PrepareError as refused:
                if "exceeded quota" in refused.reason:
                    continue  # `_quota` compares.
                # An object can be created only in a namespace that exists.
                absent = isinstance(refused, AbsentError)
                yield self._error(
                    "kubernetes.namespace" if absent else "kubernetes",
                    f"the server refuses the {what}: {refused.reason}",
                    f"the server accepts the {what}",
                    refused.hint or "`dtrain launch FILE --dry-run` shows what dtrain asks for",
                )
                return

    def _gpus(self) -> Iterator[Finding]:
        gpus, count = len(self._plan.hosts[0].host.gpus), len(self._plan.hosts)
        if not gpus:
            return
        resource = manifest.GPUS[self._keys.gpu_vendor]
        try:
            found = [*machines(self._client, self._keys)]
        except PrepareError:
            return  # Users need not be allowed to list machines.
        each = [machine.gpus for machine in found if not machine.obstacle]
        enough = sum(one >= gpus for one in each)
        if enough < count:
            most = max(each, default=0)
            selected = " match the node selector and" if self._keys.node_selector else ""
            without = f"; {left}" if (left := left_out(found)) else ""
            yield warning(
                "cluster.gpus",
                [self._client.host],
                f"{enough} of {len(found)} machines{selected} have {gpus} {resource}; the most"
                f" that one has is {most}{without}",
                f"{count} machines with {gpus}, or a cluster that adds machines",
                f"set cluster.gpus to {most} or less"
                if most
                else "set cluster.kubernetes.gpu_vendor, or ask for the device plugin",
                self._place("cluster.gpus"),
            )

    def _quota(self) -> Iterator[Finding]:
        gpus, count = len(self._plan.hosts[0].host.gpus), len(self._plan.hosts)
        needed: dict[str, float] = {"pods": count}
        asked = {**self._keys.resources, manifest.GPUS[self._keys.gpu_vendor]: str(gpus)}
        for resource, text in asked.items():
            for kind in ("requests.", "limits.", ""):
                needed[f"{kind}{resource}"] = amount(text) * count
        try:
            answer = self._client.request("GET", f"{CORE}/resourcequotas")
        except PrepareError:
            return
        for one in object_list(answer).items:
            counted = at(one, "spec", dict[str, Any]) or {}
            # Others count some pods only.
            if not (counted.get("scopes") or counted.get("scopeSelector")):
                hard, used = _texts(one, "status.hard"), _texts(one, "status.used")
                yield from self._compare(needed, hard, used)

    def _compare(
        self, needed: Mapping[str, float], limits: Mapping[str, str], uses: Mapping[str, str]
    ) -> Iterator[Finding]:
        expected = f"the quota of the namespace {self._client.namespace} has room"
        for resource, wanted in needed.items():
            if resource not in limits:
                continue
            hard, used = amount(limits[resource]), amount(uses.get(resource, "0"))
            needs = f"the job needs {written(wanted)} {resource}"
            if wanted > hard:
                yield self._error(
                    "nodes",
                    f"{needs}, and the quota is {written(hard)}",
                    expected,
                    "set cluster.nodes or cluster.gpus lower, or ask for a larger quota",
                )
            elif wanted > hard - used:
                yield warning(
                    "cluster.nodes",
                    [self._client.host],
                    f"{needs}; {written(used)} of {written(hard)} are in use",
                    expected,
                    "`kubectl describe quota` shows it; the pods wait until others end",
                )


def _texts(value: Any, path: str) -> dict[str, str]:
    return at(value, path, dict[str, Word]) or {}
