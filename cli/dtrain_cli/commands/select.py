"""Reads the values of options that several commands have. Each raises UsageError."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import TYPE_CHECKING

from dtrain import hostlist
from dtrain.diagnostics import UsageError
from dtrain.messages.decode import excerpt
from dtrain.spec.scalars import seconds
from dtrain_cli.views import Filters

if TYPE_CHECKING:
    from dtrain.launchplan.plan import LaunchPlan
    from dtrain.runs.folder import RunFolder
    from dtrain.spec.model import ClusterFile

_RANKS = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


def filters_of_run(rank: str | None, host: str | None, folder: RunFolder) -> Filters:
    """The workers of a run that ``--rank`` and ``--host`` select together."""
    if rank is None and host is None:
        return Filters()
    from dtrain.runs.record import Record

    record = Record.load(folder.path)
    # Before Slurm has given an attempt its machines, their names are unknown.
    machines = (*record.allocated, *folder.machines()) if record.allocated else ()
    return filters(rank, host, record.request.spec(), machines)


def filters(
    rank: str | None, host: str | None, spec: ClusterFile, machines: Collection[str] = ()
) -> Filters:
    """The workers that ``--rank`` and ``--host`` select together. ``machines``: those that Slurm
    has given the run so far. Without them, any names are possible there."""
    if rank is None and host is None:
        return Filters()
    # Most commands show all workers, and a dry run builds its own plan.
    from dtrain.launchplan.build import build

    plan = build(spec)
    named = plan.host_names if plan.hosts_known else machines
    known = dict.fromkeys((*named, *(spare.name for spare in spec.cluster.spares)))
    found = Filters(
        None if rank is None else _ranks(rank, plan),
        None if host is None else _hosts(host, known),
    )
    # A spare takes over the ranks of another host, fewer hosts get other ranks, and with c10d,
    # torchrun numbers the hosts.
    job = spec.job
    moves = spec.cluster.spares or job.elastic is not None or job.rendezvous.backend == "c10d"
    if found.ranks is None or found.hosts is None or moves:
        return found
    places = [
        part.host.name
        for part in plan.hosts
        for process in part.processes
        for _ in range(process.ranks)
    ]
    having = dict.fromkeys(places[one] for one in sorted(found.ranks))
    if plan.hosts_known and found.hosts.isdisjoint(having):
        raise UsageError(
            f"--rank {excerpt(rank)} and --host {excerpt(host)} have no worker in common",
            hint=f"{'these ranks are' if len(found.ranks) > 1 else 'this rank is'} on "
            f"{hostlist.brief(having)}",
        )
    return found


def _ranks(text: str, plan: LaunchPlan) -> frozenset[int]:
    """``0,4-7`` as a set of the job's ranks."""
    if not plan.job.ranked:
        raise UsageError(
            "--rank does not apply: TensorFlow tasks have no ranks", hint="choose hosts with --host"
        )
    last_rank = plan.world_size - 1
    chosen: set[int] = set()
    for part in text.split(","):
        written = _RANKS.fullmatch(part.strip())
        first, last = (int(written[1]), int(written[2] or written[1])) if written else (1, 0)
        if first > last:
            raise UsageError(
                f"--rank {excerpt(text)}: {excerpt(part)!r} is not a rank",
                hint="write e.g. --rank 0,4-7",
            )
        if last > last_rank:
            raise UsageError(f"--rank {excerpt(text)}: this job's ranks are 0-{last_rank}")
        chosen.update(range(first, last + 1))
    return frozenset(chosen)


def _hosts(text: str, known: Collection[str]) -> frozenset[str]:
    """``gpu[01-03]`` as a set of the job's hosts. ``known``: their names; empty if any name is
    possible."""
    wanted = unfolded("--host", text)
    unknown = [name for name in wanted if name not in known]
    if unknown and known:
        raise UsageError(
            f"--host {excerpt(text)}: no host {hostlist.brief(unknown)} in this cluster",
            hint=f"its hosts are {hostlist.brief(known)}",
        )
    return frozenset(wanted)


def unfolded(option: str, text: str) -> tuple[str, ...]:
    """``gpu[01-03]`` as the names of hosts."""
    try:
        return hostlist.unfold(text)
    except hostlist.HostListError as error:
        raise UsageError(f"{option} {excerpt(text)}: {error}", hint=error.hint) from None


def seconds_of(option: str, text: str | None) -> float | None:
    """``1h30m`` in seconds."""
    found = None if text is None else seconds(text)
    if text is not None and found is None:
        raise UsageError(
            f"{option} {excerpt(text)}: not a duration", hint="write e.g. 30s, 10m or 1h30m"
        )
    return found
