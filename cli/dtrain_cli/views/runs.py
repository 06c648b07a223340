"""Runs as a table, one run in detail, or JSON. Pure except for the clock of `age`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from dtrain.framing import clean
from dtrain.runs.prune import OldRun
from dtrain.runs.status import HostStatus, ProcessStatus, RunStatus, age
from dtrain.wording import counted, in_bytes
from dtrain_cli.views import names
from dtrain_cli.views.document import document
from dtrain_cli.views.report import render

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from dtrain_cli.views.paper import Paper

SCHEMA = 1
_WRAPPED = ("HOSTS", "PROGRESS")
"""Columns that wrap between words if the terminal is too narrow."""


def table(runs: Sequence[RunStatus], paper: Paper, *, of: int) -> str:
    """Return one line for each of ``runs``; ``of`` is the number of all runs."""
    if not runs:
        return "no runs on this machine\n"
    whole = _table(_columns(runs, short=False), paper)
    fits = paper.fits(whole) or not paper.terminal
    lines: list[RenderableType] = [whole] if fits else _narrow(runs, paper)
    if any(run.state == "unattended" for run in runs):
        lines += [
            "",
            "unattended runs have no launcher: attach to them (`dtrain attach RUN`) or stop them",
        ]
    for run in runs:
        if run.unreadable_lines:
            lines += ["", f"{run.run}: {_unreadable_lines(run)}"]
    if of > len(runs):
        lines += ["", f"{of - len(runs)} more with --all"]
    return paper.draw(_plain(lines, paper))


def old(found: Sequence[OldRun], paper: Paper) -> str:
    """Return one line for each run that may be removed, and the size of all."""
    if not found:
        return "no run that is over is old enough to be removed: see --older-than and --keep\n"
    rows = [
        (one.run.run, one.run.state, f"{_age(one.run, short=False)} ago", in_bytes(one.size))
        for one in found
    ]
    total = f"{counted(len(found), 'run')}, {in_bytes(sum(one.size for one in found))}"
    table = paper.table("lllr", rows, titles=("RUN", "STATE", "STARTED", "SIZE"))
    listed = [table] if paper.fits(table) or not paper.terminal else _stacked(rows, paper)
    return paper.draw([*listed, "", total])


def old_as_json(found: Sequence[OldRun], *, removed: bool) -> str:
    """Return one object with ``runs``, which were ``removed`` or could be."""
    body = [
        {"run": one.run.run, "state": one.run.state, "started": one.run.started, "bytes": one.size}
        for one in found
    ]
    return document({"schema": SCHEMA, "removed": removed, "runs": body})


def _narrow(runs: Sequence[RunStatus], paper: Paper) -> list[RenderableType]:
    """For a narrow terminal, or if names are long."""
    columns = _columns(runs, short=True)
    widths = [
        max(map(len, " ".join((title, *cells)).split() if title in _WRAPPED else (title, *cells)))
        for title, cells in columns.items()
    ]
    if sum(widths) + 2 * (len(widths) - 1) <= paper.columns:
        return [_table(columns, paper)]
    return _stacked(zip(*columns.values(), strict=True), paper)


def _stacked(rows: Iterable[Sequence[str]], paper: Paper) -> list[RenderableType]:
    """Two lines for each run. Its name stays whole, because users copy it."""
    return [
        part
        for name, state, age, *more in rows
        for part in (
            paper.line(name),
            paper.paragraph(", ".join(filter(None, (state, f"started {age}", *more))), head="  "),
        )
    ]


def _columns(runs: Sequence[RunStatus], *, short: bool) -> dict[str, list[str]]:
    """The cells of a table by title. ``short`` is for a narrow terminal: times in one unit, no
    workers, no loss and no empty column."""
    columns = {
        "RUN": [run.run for run in runs],
        "STATE": [run.state for run in runs],
        "STARTED": [f"{_age(run, short=short)} ago" for run in runs],
        "HOSTS": [_named(run, run.hosts, names.brief) for run in runs],
        "WORKERS": ["" if run.unreadable or short else str(run.workers) for run in runs],
        "PROGRESS": [clean(run.unreadable) or _progress(run, short=short) for run in runs],
    }
    return {title: cells for title, cells in columns.items() if not short or any(cells)}


def _table(columns: Mapping[str, Sequence[str]], paper: Paper) -> Table:
    align = "".join("w" if title in _WRAPPED else "l" for title in columns)
    return paper.table(align, [*zip(*columns.values(), strict=True)], titles=[*columns])


def _age(run: RunStatus, *, short: bool) -> str:
    words = names.duration(age(run.started)).split()
    return " ".join(words[:2] if short else words)


def details(run: RunStatus, paper: Paper) -> str:
    """Return one run's state, its hosts, and its final report."""
    facts = [
        ("run", run.run),
        ("state", run.state + (f" (process {run.in_charge})" if run.in_charge else "")),
        ("started", f"{names.duration(age(run.started))} ago"),
        ("job", run.job or ""),
        ("workers", str(run.workers)),
        ("attempt", _attempt(run)),
        ("progress", _progress(run)),
        ("slow", str(run.stragglers or "")),
        ("stands", str(run.stall or "")),
        ("logs", names.path(run.folder)),
        ("journal", _unreadable_lines(run) if run.unreadable_lines else ""),
    ]
    lines: list[RenderableType] = [
        paper.line((f"{title:<9}", "bold"), clean(text)) for title, text in facts if text
    ]
    lines += ["", paper.table("ww", _hosts(run))]
    if run.state == "unattended":
        lines += [
            "",
            "it has no launcher: `dtrain attach` takes charge of it, `dtrain stop` stops it",
        ]
    text = paper.draw(_plain(lines, paper))
    if run.report is None:
        return text
    # The report of a failure begins with an empty line itself.
    columns = paper.columns if paper.terminal else None
    ended = render(run.report, {}, color=paper.color, columns=columns)
    return f"{text}\n" + ended.removeprefix("\n")


def _plain(lines: Sequence[RenderableType], paper: Paper) -> list[RenderableType]:
    return [paper.line(clean(line)) if isinstance(line, str) else line for line in lines]


def as_json(runs: Sequence[RunStatus], *, of: int) -> str:
    """Return one object with ``runs``; ``of`` is the number of all runs."""
    body = []
    for run in runs:
        report = run.report.as_json() if run.report is not None else None
        body.append({**asdict(run), "state": run.state, "report": report})
    return document({"schema": SCHEMA, "runs": body, "more": of - len(runs)})


def _attempt(run: RunStatus) -> str:
    if run.attempt == 1:
        return ""
    return f"{run.attempt}, after {run.failure}" if run.failure else str(run.attempt)


def _unreadable_lines(run: RunStatus) -> str:
    return f"{counted(run.unreadable_lines, 'journal line')} could not be read"


def _named(run: RunStatus, hosts: Collection[str], named: Callable[[Iterable[str]], str]) -> str:
    return named(hosts) if run.hosts_known else counted(len(hosts), "host")


def _hosts(run: RunStatus) -> list[tuple[str, str]]:
    """One line for each group of hosts with the same state."""
    hosts = run.hosts
    groups: dict[object, list[str]] = {}
    for host, status in hosts.items():
        fates = frozenset((one.ended is None, one.code, one.signal) for one in status.processes)
        key = (status.state, status.detail, status.since is None, fates)
        groups.setdefault(key, []).append(host)
    return [
        (_named(run, group, names.hosts), clean(_host([hosts[host] for host in group])))
        for group in groups.values()
    ]


def _host(group: Sequence[HostStatus]) -> str:
    """Describe hosts in one state, with the time since the last of them entered it."""
    parts = [f"{group[0].state or 'waiting':<12}"]
    since = [one.since for one in group if one.since is not None]
    if since:
        parts.append(f"for {names.duration(age(max(since)))}")
    if processes := [process for one in group for process in one.processes]:
        parts.append(_processes(processes, lost=group[0].state == "gone"))
    return "  ".join([*parts, *filter(None, [group[0].detail])]).rstrip()


def _processes(processes: Sequence[ProcessStatus], *, lost: bool) -> str:
    """``ranks 0-2 running; rank 3 exited with status 1, 5 min 2 s ago``: grouped by outcome.
    ``lost``: whether nothing on the host knows how processes without an end have ended."""
    groups: dict[str, list[str]] = {}
    for one in processes:
        outcome = "lost" if lost and one.ended is None else _outcome(one)
        groups.setdefault(outcome, []).append(one.label)
    return "; ".join(f"{names.workers(labels)} {outcome}" for outcome, labels in groups.items())


def _outcome(process: ProcessStatus) -> str:
    if process.ended is None:
        return "running"
    how = f"exited with status {process.code}"
    if process.signal is not None:
        how = f"killed by {process.signal}"
    return f"{how}, {names.duration(age(process.ended))} ago"


def _progress(run: RunStatus, *, short: bool = False) -> str:
    report = run.progress
    if report is None:
        return ""
    if short:
        return f"{report.step:,}" + (f"/{report.total:,}" if report.total is not None else "")
    return report.reached + (f" · loss {report.loss:.4g}" if report.loss is not None else "")
