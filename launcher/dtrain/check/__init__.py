"""Judging a cluster before a launch: facts in, findings out. Pure.

What a host is like is gathered by `dtrain/node/facts.py`; which hosts are asked what, and when, is
up to `dtrain.session.preflight`. Each module here judges one subject.
"""

from __future__ import annotations

from dtrain.check import (
    bandwidth,
    clock,
    files,
    gpus,
    limits,
    machines,
    names,
    network,
    ports,
    reach,
    rehearsal,
    software,
    ssh,
    storage,
)
from dtrain.check.evidence import Evidence, HostFacts
from dtrain.check.finding import Finding, Severity, fold

__all__ = ["Evidence", "Finding", "HostFacts", "Severity", "judge"]

_SUBJECTS = (
    ssh,
    machines,
    names,
    reach,
    rehearsal,
    bandwidth,
    network,
    ports,
    files,
    software,
    gpus,
    storage,
    limits,
    clock,
)


def judge(evidence: Evidence) -> tuple[Finding, ...]:
    """Everything that is wrong, worst first; what several hosts have in common once."""
    found = [finding for subject in _SUBJECTS for finding in subject.judge(evidence)]
    return fold(found, [part.host.name for part in evidence.plan.hosts])
