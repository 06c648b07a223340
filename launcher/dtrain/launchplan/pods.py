"""The names of a job's pods and objects on Kubernetes. Pure."""

from __future__ import annotations

import re

REPLICATED_JOB = "node"
"""The name of the JobSet's part that has the pods, and of their container."""
_SLUG = 30
"""Characters of a job's name in the name of its objects. The names of pods, which are longer, have
at most 63."""


def object_name(job: str, run: str) -> str:
    """The name of the objects of a job on Kubernetes: letters, digits and hyphens. ``run`` is the
    name of a run or of one of its attempts; empty in a dry run."""
    slug = re.sub(r"[^a-z0-9]+", "-", job.lower()).strip("-")[:_SLUG].strip("-")
    slug = slug if slug[:1].isalpha() else f"job-{slug}".rstrip("-")
    unique = re.search(r"-([0-9a-f]+)(\.[0-9]+)?$", run)
    return f"{slug}-{unique[1]}" if unique else slug


def child_job(objects: str) -> str:
    """The name of the Job that owns the pods of the JobSet ``objects``."""
    return f"{objects}-{REPLICATED_JOB}-0"


def pod_address(objects: str, node_rank: int) -> str:
    """The DNS name of a pod of the JobSet ``objects``, in its namespace."""
    return f"{child_job(objects)}-{node_rank}.{objects}"


def pod_names(count: int) -> tuple[str, ...]:
    """The names of pods as hosts of a run, in node-rank order."""
    return tuple(f"node{number}" for number in range(count))
