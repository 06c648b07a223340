"""The Kubernetes engine: creates the objects of a launch plan, and follows the job to its end.

Kubernetes owns the job: it queues it, schedules the pods and restarts them. dtrain creates, watches
and deletes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from dtrain.engines.kubernetes import manifest
from dtrain.engines.kubernetes.client import Client
from dtrain.engines.kubernetes.files import config_files
from dtrain.engines.kubernetes.follow import JobFollower
from dtrain.engines.kubernetes.job import KubernetesJob
from dtrain.engines.kubernetes.launched import Launched
from dtrain.engines.kubernetes.script import render
from dtrain.failures.cause import Report
from dtrain.runs.log_store import RunFolder
from dtrain.runs.record import Record, Request
from dtrain.session.beginning import earlier_run, files_to_send, new_run, save
from dtrain.session.control import Control
from dtrain.session.observer import Observer
from dtrain.session.status import HostStatus
from dtrain.spec.model import Kubernetes


class KubernetesEngine:
    """One run. See `dtrain.engines.contract.Engine`."""

    def __init__(
        self,
        request: Request,
        *,
        observer: Observer,
        control: Control,
        on_running: Callable[[str], None] = lambda run: None,
    ) -> None:
        """``on_running`` gets the run's name once Kubernetes has accepted the job. Raises
        UsageError without a kubeconfig, or without the Python package."""
        self._request = request
        self._observer = observer
        self._control = control
        self._on_running = on_running
        keys = request.spec().cluster.kubernetes
        assert keys is not None  # noqa: S101 (types)
        self._keys: Kubernetes = keys
        self._client = Client(keys)

    def run(self, secret_values: Mapping[str, str]) -> Report:
        spec = self._request.spec()
        tree = files_to_send(self._request, spec)
        if tree is not None:
            # The size of the archive shows before the run has a folder.
            config_files(tree, "")
        with new_run(self._request, self._observer, self._control) as (record, folder):
            plan = record.plan()
            # Saved first: a process that takes over finds what was created.
            record = replace(record, job_id=Launched(self._client, record, plan).name)
            save(record, folder)
            submit = {
                "ConfigMap": manifest.config_map(plan, config_files(tree, render(plan))),
                "job": manifest.job(plan),
            }
            if spec.job.secrets:
                values = {name: secret_values[name] for name in spec.job.secrets}
                submit["Secret"] = manifest.secret(plan, values)
            return self._follower(record, folder, secret_values).follow(submit)

    def attach(self, record: Record, folder: RunFolder, secrets: Mapping[str, str]) -> Report:
        with earlier_run(record, folder, self._observer, self._control) as folder:
            return self._follower(record, folder, secrets).follow(None)

    def clean(self, record: Record, folder: RunFolder) -> bool:
        problem = Launched(self._client, record, record.plan()).delete_or_report()
        if problem:
            self._observer.notice(problem)
            return False
        save(replace(record, leftovers=()), folder)
        return True

    def status(self, record: Record, known: Mapping[str, HostStatus]) -> Mapping[str, HostStatus]:
        plan = record.plan()
        found = dict(known)
        for pod in Launched(self._client, record, plan).pods():
            if pod.index < len(plan.hosts) and pod.attempt == record.attempt:
                host = plan.hosts[pod.index].host.name
                found[host] = HostStatus(pod.state, time.time(), pod.detail)
        return found

    def _follower(
        self, record: Record, folder: RunFolder, secrets: Mapping[str, str]
    ) -> JobFollower:
        job = KubernetesJob(
            record,
            folder,
            observer=self._observer,
            on_running=self._on_running,
            secrets=secrets,
        )
        return JobFollower(job, self._client, self._control)
