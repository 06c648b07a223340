"""The status of this machine's runs, only from their folders."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping
from dataclasses import field, replace

from dtrain.diagnostics import DtrainError, UsageError
from dtrain.failures.cause import Report
from dtrain.failures.stalls import Stall
from dtrain.failures.stragglers import Straggler
from dtrain.records import dataclass
from dtrain.runs import journal
from dtrain.runs.folder import RunFolder
from dtrain.runs.journal import JournalReader
from dtrain.runs.log_store import tail
from dtrain.runs.observed import ObservedRun
from dtrain.runs.progress import Progress
from dtrain.runs.record import Record
from dtrain.runs.shown_state import FINAL, ShownState

TAIL = 1 << 17
"""Bytes at the end of a journal that have the end of most runs."""


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
    """A `ShownState`. A queried host can also be ``missing``
    (it does not know the run) or ``gone`` (the run ended without a record). After the end of a run,
    ``unknown`` if its journal has no final state."""
    since: float | None
    """Seconds since the epoch, if known."""
    detail: str = ""
    processes: tuple[ProcessStatus, ...] = ()
    """Set if the host itself was queried."""

    def seen(self, state: str, detail: str = "") -> HostStatus:
        """The host in ``state`` now: it keeps the time since when, if it was in that state."""
        return HostStatus(state, self.since if self.state == state else time.time(), detail)


@dataclass(frozen=True, slots=True)
class RunStatus:
    run: str
    folder: str
    started: float
    """Seconds since the epoch."""
    workers: int = 0
    job: str | None = None
    """The number that the engine gave the job; None if it gives none, or has not yet."""
    in_charge: int | None = None
    """PID of the process on this machine that is in charge of the run."""
    hosts: Mapping[str, HostStatus] = field(default_factory=dict)
    hosts_known: bool = True
    """Whether ``hosts`` has names of machines. Before an engine chooses them, it numbers them."""
    attempt: int = 1
    """The latest attempt: 1 for the first start, 2 after a restart."""
    failure: str = ""
    """Why the attempt before it failed; empty for the first one."""
    progress: Progress | None = None
    stragglers: Straggler | None = None
    """The ranks that are slow now."""
    stall: Stall | None = None
    """The ranks that stand still now."""
    report: Report | None = None
    """How the run ended; None until it has."""
    unreadable_lines: int = 0
    """Journal lines that are damaged or that another version of dtrain wrote."""
    unreadable: str = ""
    """Why the run cannot be read; empty for most runs."""

    @property
    def active(self) -> bool:
        """Whether the run is not over, as far as is known."""
        return self.in_charge is not None or self.state == "unattended"

    @property
    def state(self) -> str:
        """``unreadable``, or a state that `state_of` returns."""
        if self.unreadable:
            return "unreadable"
        hosts = [host.state for host in self.hosts.values()]
        return state_of(self.report, hosts, attended=self.in_charge is not None)


def state_of(report: Report | None, hosts: Iterable[str], *, attended: bool) -> str:
    """``queued``, ``running``, ``unattended`` (started, without a launcher), or how a run ended:
    ``done``, ``failed``, ``stopped``. ``hosts``: the state of each."""
    if report is not None:
        return report.state
    if not attended:
        return "unattended"
    return "queued" if set(hosts) == {ShownState.QUEUED} else "running"


def status(folder: RunFolder) -> RunStatus:
    """Raises DtrainError if this version cannot read the folder's run."""
    record = Record.load(folder.path)
    plan = record.plan
    lines = JournalReader(folder.journal)
    known = ObservedRun.of(lines.read())
    in_charge = None if known.report else folder.in_charge()
    # A launcher may have written the end meanwhile, and exited.
    for then, event in lines.read():
        known.add(then, event)
    now, report = known.attempt, known.report
    until = known.until(time.time(), attended=in_charge is not None)
    began = record.started if now.number == 1 else now.began
    hosts = dict.fromkeys(plan.host_names, HostStatus("", began))
    for name in hosts.keys() & now.hosts.keys():
        since, seen = now.hosts[name]
        hosts[name] = HostStatus(seen.state, since, seen.detail)
    if report is not None:
        # The launcher may have been killed before it reported the final states.
        hosts = {
            host: one if one.state in FINAL else HostStatus("unknown", one.since)
            for host, one in hosts.items()
        }
    # Until the next attempt begins, the failure is that of this one.
    before = None if now.number in known.results else known.failure
    return RunStatus(
        run=record.run,
        folder=str(folder.path),
        started=record.started,
        workers=plan.world_size,
        job=record.job_id,
        in_charge=None if report else in_charge,
        hosts=hosts,
        hosts_known=plan.hosts_known,
        attempt=now.number,
        failure=before.reason if before is not None else "",
        progress=now.progress[-1] if now.progress else None,
        stragglers=now.slow,
        stall=now.stall_at(until),
        report=report,
        unreadable_lines=lines.unreadable,
    )


def statuses() -> list[RunStatus]:
    """All runs of this machine, the latest last."""
    return _in_order(RunFolder.all())


def open_folders() -> list[RunFolder]:
    """The folders of runs whose journal has no end, the oldest first. Reads only the end of each
    journal, so that many finished runs cost little."""
    return [folder for folder in RunFolder.all() if journal.END not in tail(folder.journal, TAIL)]


def active() -> list[RunStatus]:
    """The runs that are not over, as far as is known, the latest last."""
    return [one for one in _in_order(open_folders()) if one.active]


def latest(count: int) -> list[RunStatus]:
    """At most ``count`` runs whose folders changed last, the latest last."""
    return _in_order(RunFolder.all()[-count:])


def find_run(name: str) -> RunFolder:
    """The run that a command means: like `RunFolder.find`, but of several runs that ``name`` may
    mean, the one that is not over. Raises UsageError, also if several are not over, and
    StorageError."""
    like = {folder.name for folder in RunFolder.named(name)}
    if len(like) > 1 and name not in like:
        alive = [one.run for one in active() if one.run in like]
        if len(alive) > 1:
            raise UsageError(
                f"{name!r} means {len(alive)} runs that are not over",
                hint=f"name one of them: {', '.join(alive[-3:])}",
            )
        name = alive[0] if alive else name
    return RunFolder.find(name)


def _in_order(folders: Iterable[RunFolder]) -> list[RunStatus]:
    return sorted(map(_readable_or_not, folders), key=lambda one: one.started)


def _readable_or_not(folder: RunFolder) -> RunStatus:
    """The status of a run, even if it is damaged, so that other runs stay listed."""
    try:
        return status(folder)
    except DtrainError as error:
        run = RunStatus(folder.name, str(folder.path), folder.started, unreadable=error.message)
        with contextlib.suppress(DtrainError):  # the damaged file may be this one
            run = replace(run, in_charge=folder.in_charge())
        return run


def age(since: float) -> float:
    """Seconds since ``since``."""
    return max(0.0, time.time() - since)
