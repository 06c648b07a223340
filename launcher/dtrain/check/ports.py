"""The TCP ports that the job will listen on."""

from __future__ import annotations

from collections.abc import Iterator

from dtrain.check.evidence import Evidence
from dtrain.check.finding import Finding, error, warning

SUBJECT = "port"


def judge(evidence: Evidence) -> Iterator[Finding]:
    fixed = evidence.plan.job.rendezvous.fixed
    for host in evidence.hosts:
        for port, found in host.fact("ports").items():
            if found["free"]:
                continue
            holder = found.get("holder")
            seen = f"port {port}: {found.get('reason') or 'it cannot be opened'}"
            if holder:
                seen = f"port {port} is taken by {holder}"
            if fixed:
                remedy = "stop it, or choose another job.rendezvous.port"
                yield error(SUBJECT, [host.name], seen, f"port {port} is free", remedy)
            else:
                remedy = "none is needed: a launch takes the next free port; or stop it"
                yield warning(SUBJECT, [host.name], seen, f"port {port} is free", remedy)
