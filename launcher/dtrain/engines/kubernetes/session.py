"""The Kubernetes engine: creates the objects of a launch plan, and follows the job to its end.

Kubernetes owns the job: it queues it, schedules the pods and restarts them. dtrain creates, watches
and deletes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dtrain.diagnostics import NodeError
from dtrain.engines.kubernetes import manifest
from dtrain.engines.kubernetes.client import Client
from dtrain.engines.kubernetes.files import config_files
from dtrain.engines.kubernetes.follow import KubernetesFollower
from dtrain.engines.kubernetes.job import KubernetesJob
from dtrain.engines.kubernetes.launched import LaunchedJob, client_of
from dtrain.engines.kubernetes.script import render
from dtrain.failures.cause import Report
from dtrain.launchplan.build import build
from dtrain.runs.folder import RunFolder
from dtrain.runs.record import Record
from dtrain.runs.request import Request
from dtrain.runs.shown_state import ShownState
from dtrain.runs.status import HostStatus
from dtrain.session.beginning import earlier_run, files_to_send, new_run
from dtrain.session.caller import Caller
from dtrain.session.stopping.control import Force
from dtrain.spec.model import Kubernetes
from dtrain.transport.select import allow_files

CONNECTIONS = 2
"""To each pod: for its log, and to its watcher."""


class KubernetesEngine:
    """One run. See `dtrain.engines.contract.Engine`. All methods raise UsageError without a
    kubeconfig, or without the Python package."""

    def __init__(self, request: Request, caller: Caller) -> None:
        self._request = request
        self._caller = caller
        keys = request.spec().cluster.kubernetes
        assert keys is not None  # noqa: S101 (types)
        self._keys: Kubernetes = keys

    def run(self, secret_values: Mapping[str, str]) -> Report:
        client = Client(self._keys)
        spec = self._request.spec()
        tree = files_to_send(self._request, spec, self._caller.control)
        # Refused before the run has a folder.
        plan = build(spec)
        files = config_files(tree, render(plan))
        allow_files(len(plan.hosts) * CONNECTIONS)
        with new_run(self._request, self._caller, tree) as (record, folder):
            job = KubernetesJob(record, folder, self._caller, secret_values)
            # Saved first: a process that takes over finds what was created.
            job.change(job_id=job.name, context=client.context, namespace=client.namespace)
            submit = {
                "ConfigMap": manifest.config_map(job.plan, files),
                "job": manifest.job(job.plan),
            }
            if spec.job.secrets:
                values = {name: secret_values[name] for name in spec.job.secrets}
                submit["Secret"] = manifest.secret(job.plan, values)
            for notice in tree.notices if tree is not None else ():
                job.recorder.notice(notice)
            return KubernetesFollower(job, client, self._caller.control).follow(submit)

    def attach(self, record: Record, folder: RunFolder, secrets: Mapping[str, str]) -> Report:
        client = client_of(record, self._keys)
        allow_files(len(record.plan.hosts) * CONNECTIONS)
        with earlier_run(record, folder, self._caller) as folder:
            job = KubernetesJob(record, folder, self._caller, secrets)
            return KubernetesFollower(job, client, self._caller.control).follow(None)

    def clean(self, record: Record, folder: RunFolder) -> bool:
        def asked() -> Force:
            return Force.GIVE_UP if self._caller.control.interrupted else Force.NONE

        launched = LaunchedJob(client_of(record, self._keys), record.plan, asked)
        if problem := launched.delete_or_report():
            self._caller.observer.notice(problem)
            return False
        replace(record, leftovers=()).save(folder.path)
        return True

    def status(self, record: Record, known: Mapping[str, HostStatus]) -> Mapping[str, HostStatus]:
        plan = record.plan
        launched = LaunchedJob(client_of(record, self._keys), plan)
        try:
            state, pods = launched.state(), launched.pods()
        except NodeError as error:
            return {host: HostStatus(ShownState.UNREACHABLE, None, error.reason) for host in known}
        if state is None:
            return {host: HostStatus("gone", None) for host in known}
        without_pod = ShownState.ENDED if state.over else ShownState.QUEUED
        found = dict.fromkeys(plan.host_names, (without_pod, ""))
        # After a restart or a suspension, one host may have several pods: the last one counts.
        for pod in sorted(pods, key=lambda pod: (pod.attempt, pod.created)):
            if pod.index < len(plan.hosts):
                found[plan.host_names[pod.index]] = pod.state, pod.detail
        return {host: known[host].seen(word, detail) for host, (word, detail) in found.items()}
