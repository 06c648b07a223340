"""Judges all subjects of a check."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from dtrain.checks import (
    allocation,
    bandwidth,
    clock,
    containers,
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
from dtrain.checks.evidence import Evidence
from dtrain.checks.finding import Finding, Severity, fold

_SUBJECTS = (
    ssh, allocation, machines, names, reach, rehearsal, bandwidth, network, ports, files, software,
    containers, gpus, storage, limits, clock,
)  # fmt: skip


def judge(evidence: Evidence) -> tuple[Finding, ...]:
    """All findings, worst first. Hosts with the same finding share it."""
    return _judged(evidence, gpus.unknown(evidence.plan))


def before_launch(evidence: Evidence) -> tuple[Finding, ...]:
    """The findings that a launch reports before it prepares anything.

    Leaves out what does not affect the launch, and what it handles itself: a taken port if it may
    choose another one. Failures to connect are included only if there are other errors too.
    """
    found = _judged(replace(evidence, failures=()))
    if any(finding.severity is Severity.ERROR for finding in found):
        found = _judged(evidence)
    moved = (Severity.WARNING, ports.SUBJECT)
    return tuple(finding for finding in found if (finding.severity, finding.subject) != moved)


def _judged(evidence: Evidence, more: Iterable[Finding] = ()) -> tuple[Finding, ...]:
    found = [finding for subject in _SUBJECTS for finding in subject.judge(evidence)]
    return fold([*evidence.request, *found, *more], evidence.plan.host_names)
