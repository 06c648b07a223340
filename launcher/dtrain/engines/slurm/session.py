"""The Slurm engine: submits the script of a launch plan, and follows the job until it has ended.

Slurm owns the job: it queues it, allocates hosts, starts the processes and ends them. dtrain only
submits, watches and cancels.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from dtrain.engines.slurm import submission
from dtrain.engines.slurm.follow import JobFollower
from dtrain.engines.slurm.login import Login
from dtrain.engines.slurm.script import render
from dtrain.failures.cause import Report
from dtrain.runs import journal
from dtrain.runs.journal import Journal
from dtrain.runs.log_store import RunFolder, storage_error
from dtrain.runs.record import Record, Request, run_name
from dtrain.session import history
from dtrain.session.control import Control
from dtrain.session.observer import Observer
from dtrain.session.status import HostStatus
from dtrain.session.stop_requests import listening
from dtrain.transport.contract import Transport


class SlurmEngine:
    """One run. See `dtrain.engines.contract.Engine`."""

    def __init__(
        self,
        request: Request,
        *,
        transport: Transport,
        observer: Observer,
        control: Control,
        on_running: Callable[[str], None] = lambda run: None,
    ) -> None:
        """``on_running`` gets the run's name once Slurm has accepted the job."""
        self._request = request
        self._transport = transport
        self._observer = observer
        self._control = control
        self._on_running = on_running

    def run(self, secret_values: Mapping[str, str]) -> Report:
        begun = time.time()
        spec = self._request.spec()
        name = run_name(spec.name)
        folder = RunFolder.create(name)
        claim = folder.claim()
        port = spec.job.rendezvous.first_port
        record = Record(name, self._request, port, sys.executable, begun)
        try:
            record.save(folder.path)
        except OSError as error:
            raise storage_error(folder.path, error) from None
        plan = record.plan()
        self._observer.started(name, plan, str(folder.path))
        hosts = tuple(part.host.name for part in plan.hosts)
        Journal(folder.journal).write(begun, journal.RunStarted(name, hosts))
        order = submission.submit_order(
            name,
            plan.run_dir,
            workdir=str(self._request.base) if self._login(record).is_here else "~",
            script=render(plan),
            secrets={name: secret_values[name] for name in spec.job.secrets},
            hidden=[name for name in secret_values if name not in spec.job.secrets],
        )
        try:
            with listening(folder, self._control):
                return self._follower(record, folder, secret_values).follow(order)
        finally:
            if claim is not None:
                claim.release()

    def attach(self, record: Record, folder: RunFolder, secrets: Mapping[str, str]) -> Report:
        folder = replace(folder, attempt=record.attempt)
        plan = record.plan()
        self._observer.attached(record.run, plan, str(folder.path))
        Journal(folder.journal).write(time.time(), journal.LauncherAttached(os.getpid()))
        for stream, size in folder.sizes(plan).items():
            self._observer.skip(stream, size)
        if not self._control.interrupted and (why := history.stop_reason(folder)):
            self._control.stop(why)
        with listening(folder, self._control):
            return self._follower(record, folder, secrets).follow(None)

    def clean(self, record: Record, folder: RunFolder) -> bool:
        """Slurm itself ends every process of a job."""
        return True

    def status(self, record: Record, known: Mapping[str, HostStatus]) -> Mapping[str, HostStatus]:
        return self._login(record).status(known)

    def _follower(
        self, record: Record, folder: RunFolder, secrets: Mapping[str, str]
    ) -> JobFollower:
        return JobFollower(
            record,
            folder,
            login=self._login(record),
            observer=self._observer,
            control=self._control,
            on_running=self._on_running,
            secrets=secrets,
        )

    def _login(self, record: Record) -> Login:
        return Login(self._transport, record)
