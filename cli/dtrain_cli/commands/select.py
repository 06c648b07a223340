"""Reads the values of options that several commands have. Each raises UsageError."""

from __future__ import annotations

import re

from dtrain import hostlist
from dtrain.diagnostics import UsageError
from dtrain.launchplan.build import build
from dtrain.messages.decode import excerpt
from dtrain.spec.model import ClusterFile
from dtrain.spec.scalars import seconds

_RANKS = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


def ranks(text: str | None, spec: ClusterFile) -> frozenset[int] | None:
    """``0,4-7`` as a set of the job's ranks."""
    if text is None:
        return None
    if not spec.job.ranked:
        raise UsageError(
            "--rank does not apply: TensorFlow tasks have no ranks", hint="choose hosts with --host"
        )
    last_rank = build(spec).world_size - 1
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


def hosts(text: str | None, spec: ClusterFile) -> frozenset[str] | None:
    """``gpu[01-03]`` as a set of the job's hosts. On Slurm, it may be any names: each attempt may
    get other machines."""
    if text is None:
        return None
    wanted = unfolded("--host", text)
    plan = build(spec)
    known = dict.fromkeys((*plan.host_names, *(host.name for host in spec.cluster.spares)))
    unknown = [name for name in wanted if name not in known]
    if unknown and plan.hosts_known:
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


def duration(option: str, text: str | None) -> float | None:
    """``1h30m`` in seconds."""
    found = None if text is None else seconds(text)
    if text is not None and found is None:
        raise UsageError(
            f"{option} {excerpt(text)}: not a duration", hint="write e.g. 30s, 10m or 1h30m"
        )
    return found
