"""`dtrain check` on Kubernetes: asks the API server what a launch would need."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated

from dtrain.checks import Evidence, Finding, Severity
from dtrain.checks.finding import error, warning
from dtrain.diagnostics import AnswerError, NodeError, PrepareError
from dtrain.engines.kubernetes import manifest, permissions
from dtrain.engines.kubernetes.client import Client, NotFoundError
from dtrain.engines.kubernetes.image_check import ImageCheck
from dtrain.engines.kubernetes.launched import JOBS
from dtrain.engines.kubernetes.objects import Word, object_list
from dtrain.engines.kubernetes.permissions import GROUPS
from dtrain.launchplan.plan import LaunchPlan, build
from dtrain.messages.decode import Length, ProtocolError, decode
from dtrain.runs.record import Request
from dtrain.spec.kubernetes_keys import CLAIM
from dtrain.spec.load import position
from dtrain.spec.model import Kubernetes


@dataclass(frozen=True, slots=True)
class _Version:
    version: Word = ""


@dataclass(frozen=True, slots=True)
class _Group:
    versions: Annotated[tuple[_Version, ...], Length(100)] = ()


@dataclass(frozen=True, slots=True)
class _Amounts:
    allocatable: Mapping[str, Word] = field(default_factory=dict)
    hard: Mapping[str, Word] = field(default_factory=dict)
    used: Mapping[str, Word] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Unschedulable:
    unschedulable: bool | None = None


@dataclass(frozen=True, slots=True)
class _Measured:
    """A machine, or a quota."""

    spec: _Unschedulable = _Unschedulable()
    status: _Amounts = _Amounts()


def examine(request: Request) -> Evidence:
    """The evidence of a file with `cluster.kubernetes`. Raises UsageError without a kubeconfig."""
    plan = build(request.spec())
    keys = plan.kubernetes
    assert keys is not None  # noqa: S101 (types)
    client = Client(keys)
    place = partial(position, request.text.encode(errors="surrogateescape"), request.file)
    nobody = replace(plan, hosts=())
    try:
        client.request("GET", "/version")
        found = [*Inspection(plan, keys, client, place).findings()]
        if not any(one.severity is Severity.ERROR for one in found):
            found += ImageCheck(plan, client, place).findings()
    except NodeError as failure:
        return Evidence(nobody, (), (failure,))
    except ProtocolError as wrong:
        return Evidence(nobody, (), (AnswerError(client.host, "checking the cluster", wrong),))
    return Evidence(nobody, (), request=tuple(found))


class Inspection:
    """Compares one file with one cluster. Raises NodeError and ProtocolError."""

    def __init__(
        self, plan: LaunchPlan, keys: Kubernetes, client: Client, place: Callable[[str], str]
    ) -> None:
        self._plan = plan
        self._keys = keys
        self._client = client
        self._place = place

    def findings(self) -> Iterator[Finding]:
        missing = [*self._kinds()]
        denied = [*self._denied()]
        references = [*self._references()]
        yield from (*missing, *denied, *references)
        if not missing and not denied and not references:
            yield from self._refused()
        yield from self._gpus()
        yield from self._quota()

    def _error(self, key: str, seen: str, expected: str, remedy: str) -> Finding:
        path = f"cluster.{key}"
        return error(path, [self._client.host], seen, expected, remedy, self._place(path))

    def _kinds(self) -> Iterator[Finding]:
        group, version, resource, program = GROUPS[self._keys.api]
        try:
            answer = self._client.request("GET", f"/apis/{group}")
        except NotFoundError:
            yield self._error(
                "kubernetes.api",
                f"the cluster does not know {resource}.{group}",
                f"{program} is installed",
                f"ask the administrator to install {program}, or use another api",
            )
            return
        versions = [one.version for one in decode(_Group, answer, "group").versions]
        if version not in versions:
            yield self._error(
                "kubernetes.api",
                f"{group} has the versions {', '.join(versions) or 'none'}",
                f"{group}/{version}",
                f"ask the administrator for a {program} that serves {version}",
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

    def _references(self) -> Iterator[Finding]:
        """Objects that the file names and the cluster does not have."""
        keys, core = self._keys, "/api/v1/namespaces/{namespace}"
        kueue = "/apis/kueue.x-k8s.io/v1beta1/namespaces/{namespace}/localqueues"
        runtimes = "/apis/trainer.kubeflow.org/v1alpha1/clustertrainingruntimes"
        named = [
            *(("claims", f"{core}/persistentvolumeclaims", _claim(one)) for one in keys.claims),
            *(("pull_secrets", f"{core}/secrets", one) for one in keys.pull_secrets),
            ("service_account", f"{core}/serviceaccounts", keys.service_account),
            ("priority", "/apis/scheduling.k8s.io/v1/priorityclasses", keys.priority),
            ("queue", kueue, keys.queue),
            ("runtime", runtimes, keys.runtime if keys.api == "trainjob" else None),
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
        """What the server says to the job itself, without creating it."""
        path = JOBS[self._keys.api]
        try:
            self._client.request("POST", path, manifest.job(self._plan), dryRun="All")
        except PrepareError as refused:
            yield self._error(
                "kubernetes",
                f"the server refuses the job: {refused.reason}",
                "the server accepts the job",
                "`dtrain launch FILE --dry-run` shows what dtrain asks for",
            )

    def _gpus(self) -> Iterator[Finding]:
        gpus, count = len(self._plan.hosts[0].host.gpus), len(self._plan.hosts)
        if not gpus:
            return
        resource = manifest.GPUS[self._keys.gpu_vendor]
        try:
            answer = self._client.request("GET", "/api/v1/nodes")
        except PrepareError:
            return  # Users need not be allowed to list machines.
        machines = [decode(_Measured, one, "node") for one in object_list(answer).items]
        each = [
            _amount(machine.status.allocatable.get(resource, "0"))
            for machine in machines
            if not machine.spec.unschedulable
        ]
        enough = sum(one >= gpus for one in each)
        if enough < count:
            most = max(each, default=0)
            yield warning(
                "cluster.gpus",
                [self._client.host],
                f"{enough} of {len(machines)} machines have {gpus} {resource}; the most that one"
                f" has is {most}",
                f"{count} machines with {gpus}, or a cluster that adds machines",
                f"set cluster.gpus to {most} or less"
                if most
                else "set cluster.kubernetes.gpu_vendor, or ask for the device plugin",
                self._place("cluster.gpus"),
            )

    def _quota(self) -> Iterator[Finding]:
        gpus, count = len(self._plan.hosts[0].host.gpus), len(self._plan.hosts)
        needed = {"pods": count, f"requests.{manifest.GPUS[self._keys.gpu_vendor]}": gpus * count}
        try:
            answer = self._client.request("GET", "/api/v1/namespaces/{namespace}/resourcequotas")
        except PrepareError:
            return
        for one in object_list(answer).items:
            quota = decode(_Measured, one, "quota").status
            for resource, amount in needed.items():
                if resource not in quota.hard:
                    continue
                hard, used = _amount(quota.hard[resource]), _amount(quota.used.get(resource, "0"))
                expected = f"the quota of the namespace {self._client.namespace} has room"
                if amount > hard:
                    yield self._error(
                        "nodes",
                        f"the job needs {amount} {resource}, and the quota is {hard}",
                        expected,
                        "set cluster.nodes or cluster.gpus lower, or ask for a larger quota",
                    )
                elif amount > hard - used:
                    yield warning(
                        "cluster.nodes",
                        [self._client.host],
                        f"the job needs {amount} {resource}; {used} of {hard} are in use",
                        expected,
                        "`kubectl describe quota` shows it; the pods wait until others end",
                    )


def _claim(text: str) -> str | None:
    found = CLAIM.fullmatch(text)
    return found["name"] if found else None


_SUFFIXES = {"k": 10**3, "M": 10**6, "G": 10**9}


def _amount(text: str) -> int:
    """A count as Kubernetes writes it, such as ``8`` or ``1k``. Raises ProtocolError."""
    digits, factor = (text[:-1], _SUFFIXES[text[-1:]]) if text[-1:] in _SUFFIXES else (text, 1)
    if not digits.isascii() or not digits.isdecimal() or len(digits) > 12:
        raise ProtocolError(f"not a count: {text[:40]!r}")
    return int(digits) * factor
