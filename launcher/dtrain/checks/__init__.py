"""Judging a cluster before a launch: facts in, findings out. Pure.

What a host is like is gathered by `dtrain.node.facts`; which hosts are asked what, and when, is
up to `dtrain.session.preflight`. Each module here judges one subject.
"""

from __future__ import annotations

from dataclasses import replace

from dtrain.checks import (
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
from dtrain.checks.evidence import Evidence, HostFacts
from dtrain.checks.finding import Finding, Severity, fold

__all__ = ["Evidence", "Finding", "HostFacts", "Severity", "before_launch", "judge"]

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


def before_launch(evidence: Evidence) -> tuple[Finding, ...]:
    """What a launch should tell before it prepares anything.

    That is not what it deals with by itself: where a port is taken and it may choose another, and
    where nothing can be started on a host, which is told together with other errors alone.
    """
    found = judge(replace(evidence, failures=()))
    if any(finding.severity is Severity.ERROR for finding in found):
        found = judge(evidence)
    moved = (Severity.WARNING, ports.SUBJECT)
    return tuple(finding for finding in found if (finding.severity, finding.subject) != moved)
