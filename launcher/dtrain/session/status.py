"""How the runs of this machine stand, from their folders alone."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from dtrain.cause import Report
from dtrain.diagnostics import DtrainError
from dtrain.journal import JournalReader
from dtrain.logs.store import RunFolder
from dtrain.progress import Progress
from dtrain.record import Record
from dtrain.session.follow import read_report


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """One process that dtrain has started on a host."""

    label: str
    """The rank, or role and index."""
    pid: int
    started: float
    """Seconds since the epoch."""
    ended: float | None
    """Seconds since the epoch; None while it runs."""
    code: int | None
    """Exit status; None when a signal ended it."""
    signal: str | None


@dataclass(frozen=True, slots=True)
class HostStatus:
    state: str
    """As in `session.observer.Observer.host_state`; a host that was asked may also say
    ``missing`` (it knows of no such run) or ``gone`` (the run has not ended as it should)."""
    since: float | None
    """Seconds since the epoch, where that is known."""
    detail: str = ""
    processes: tuple[ProcessStatus, ...] = ()
    """Where the host itself was asked."""


@dataclass(frozen=True, slots=True)
class RunStatus:
    run: str
    folder: str
    started: float
    """Seconds since the epoch."""
    workers: int
    in_charge: int | None
    """The process on this machine that is in charge of it."""
    hosts: Mapping[str, HostStatus] = field(default_factory=dict)
    progress: Progress | None = None
    report: Report | None = None
    """How it ended, once it has."""

    @property
    def state(self) -> str:
        """``running``, ``unattended`` (started, and nobody is in charge), or how it ended:
        ``done``, ``failed``, ``stopped``."""
        if self.report is not None:
            return {0: "done", 130: "stopped"}.get(int(self.report.exit_code), "failed")
        return "running" if self.in_charge is not None else "unattended"


def status(folder: RunFolder) -> RunStatus | None:
    """None for a folder that this version cannot read a run in."""
    try:
        return _status(folder)
    except (DtrainError, KeyError, TypeError, ValueError):
        return None


def _status(folder: RunFolder) -> RunStatus:
    record = Record.load(folder.path)
    plan = record.plan()
    hosts = {part.host.name: HostStatus("", record.started) for part in plan.hosts}
    progress: Progress | None = None
    report: Report | None = None
    for event in JournalReader(folder.journal).read():
        match event["event"]:
            case "host" if event["host"] in hosts:
                hosts[event["host"]] = HostStatus(event["state"], event["time"], event["detail"])
            case "progress":
                progress = Progress.read(event["process"], event["said"])
            case "finished":
                report = read_report(event)
    return RunStatus(
        run=record.run,
        folder=str(folder.path),
        started=record.started,
        workers=plan.world_size,
        in_charge=None if report else folder.in_charge(),
        hosts=hosts,
        progress=progress,
        report=report,
    )


def statuses() -> list[RunStatus]:
    """All runs of this machine, the latest last."""
    found = [status(folder) for folder in RunFolder.all()]
    return sorted((one for one in found if one is not None), key=lambda one: one.started)


def age(since: float) -> float:
    """Seconds from ``since`` until now."""
    return max(0.0, time.time() - since)
