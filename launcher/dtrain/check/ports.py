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
            by = found["holder"] or found["reason"]
            seen = f"port {port} is taken by {by}" if found["holder"] else f"port {port}: {by}"
            if fixed:
                remedy = "stop it, or choose another job.rendezvous.port"
                yield error(SUBJECT, [host.name], seen, f"port {port} is free", remedy)
            else:
                remedy = "none is needed: a launch takes the next free port; or stop it"
                yield warning(SUBJECT, [host.name], seen, f"port {port} is free", remedy)
