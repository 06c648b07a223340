"""Checks the TCP ports that the job listens on."""

from __future__ import annotations

from collections.abc import Iterator, Set

from dtrain.checks.evidence import Evidence
from dtrain.checks.finding import Finding

SUBJECT = "port"


def judge(evidence: Evidence) -> Iterator[Finding]:
    rendezvous = evidence.plan.job.rendezvous
    for host in evidence.hosts:
        found = host.fact("ports")
        taken = {int(port) for port, one in found.items() if not one["free"]}
        needed = host.part.ports
        for port in taken.intersection(needed):
            one = found[str(port)]
            expected = f"port {port} is free"
            seen = f"port {port}: {one.get('reason') or 'cannot be opened'}"
            if one.get("holder"):
                seen = f"port {port} is taken by {one['holder']}"
            judged, remedy = host.error, "stop it, or choose another job.rendezvous.port"
            if rendezvous.port is None:
                remedy = "stop it, or widen job.rendezvous.ports"
                if one.get("room", True) and _has_room(rendezvous.ports, taken, len(needed)):
                    judged, remedy = host.warning, "no action needed: a launch chooses another port"
            yield judged(SUBJECT, seen, expected, remedy)


def _has_room(ports: tuple[int, int], taken: Set[int], needed: int) -> bool:
    """Whether ``needed`` consecutive ports of a range are free."""
    run = 0
    for port in range(ports[0], ports[1] + 1):
        run = 0 if port in taken else run + 1
        if run == needed:
            return True
    return False
