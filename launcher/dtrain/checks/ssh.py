"""Hosts that cannot be reached or asked, and those that answer slowly."""

from __future__ import annotations

from collections.abc import Iterator

from dtrain.checks.evidence import Evidence
from dtrain.checks.finding import Finding, error, warning

SLOW = 1.0
"""Seconds of a round trip from which on a launch is held up."""


def judge(evidence: Evidence) -> Iterator[Finding]:
    for failure in evidence.failures:
        yield error(
            "ssh",
            [failure.host],
            f"{failure.attempted}: {failure.reason}",
            "dtrain can run Python on every host",
            failure.hint.replace("\n", "; "),
        )
    for host in evidence.hosts:
        if host.latency > SLOW:
            yield warning(
                "ssh",
                [host.name],
                f"the quickest of several answers took {host.latency:.1f} s",
                "answers within a fraction of a second",
                "look at that host's load (`uptime`) and at the route to it (`mtr`)",
            )
        for probe, found in host.facts.items():
            # A GPU tool that fails has said why, and is judged by `gpus`.
            if "error" in found and "tool" not in found:
                yield warning(
                    probe,
                    [host.name],
                    f"this could not be looked at: {found['error']}",
                    "an answer",
                    "try by hand what is named there; a file system or a driver may hang",
                )
