"""The names of a job's processes in files, messages and reports. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

REPLICATED_JOB = "node"
"""The name of the JobSet's part that has the pods, and of their container."""
_NAMED = 4
"""Processes that a sentence names."""


def process_name(role: str, index: int) -> str:
    """The name of a process that dtrain starts, in files and messages: ``worker-3``."""
    return f"{role}-{index}"


def rank_name(rank: int) -> str:
    """The name of a rank where it may not be a process that dtrain starts: ``rank-3``."""
    return f"rank-{rank}"


def parsed(name: str) -> tuple[str, int]:
    """The role, or ``rank``, and the number in a name. Raises ValueError for other text."""
    role, _, number = name.rpartition("-")
    return role, int(number)


def label(role: str, index: int, rank: int | None) -> str:
    """Short name in front of output: the rank, or role and index such as ``ps1``."""
    return str(rank) if rank is not None else f"{role}{index}"


def spoken(names: Sequence[str]) -> str:
    """Names in a sentence: ``rank 3, rank 5 and 2 more``."""
    shown = ", ".join(name.replace("-", " ", 1) for name in names[:_NAMED])
    more = len(names) - _NAMED
    return f"{shown} and {more} more" if more > 0 else shown


_SLUG = 30
"""Characters of a job's name in the name of its objects. The names of pods, which are longer, have
at most 63."""


def object_name(job: str, run: str | None) -> str:
    """The name of the objects of a job on Kubernetes: letters, digits and hyphens. ``run`` is the
    name of a run or of one of its attempts; None in a dry run."""
    slug = re.sub(r"[^a-z0-9]+", "-", job.lower()).strip("-")[:_SLUG].strip("-")
    slug = slug if slug[:1].isalpha() else f"job-{slug}".rstrip("-")
    unique = re.search(r"-([0-9a-f]+)(\.[0-9]+)?$", run) if run is not None else None
    return f"{slug}-{unique[1]}" if unique else slug


def pod_address(objects: str, node_rank: int) -> str:
    """The DNS name of a pod of the JobSet ``objects``, in its namespace."""
    return f"{objects}-{REPLICATED_JOB}-0-{node_rank}.{objects}"


def pods(count: int) -> tuple[str, ...]:
    """The names of pods as hosts of a run, in node-rank order."""
    return tuple(f"node{number}" for number in range(count))
