"""Hosts that are unreachable, answer slowly, or have failed probes."""

from __future__ import annotations

from collections.abc import Iterator

from dtrain.checks.evidence import Evidence
from dtrain.checks.finding import Finding, error, warning
from dtrain.failures.cause import of_one_kind, shown_for

SLOW = 1.0
"""Round trip in seconds above which launches are slow."""


def judge(evidence: Evidence) -> Iterator[Finding]:
    # Slurm starts dtrain's program on its machines; SSH leads to the login node alone.
    chosen = set(evidence.plan.host_names if evidence.plan.slurm else ())
    for same in of_one_kind(evidence.failures, [part.host for part in evidence.plan.hosts]):
        first, hosts = same[0], [failure.host for failure in same]
        yield error(
            "machines" if first.host in chosen else "ssh",
            hosts,
            f"{first.attempted}: {first.reason}{shown_for(first.host, hosts)}",
            "dtrain can run Python on every host",
            first.hint.replace("\n", "; "),
        )
    for host in evidence.hosts:
        if host.latency > SLOW:
            yield warning(
                "ssh",
                [host.name],
                f"the fastest of several round trips took {host.latency:.1f} s",
                "round trips of less than 1 s",
                "check the load of that host (`uptime`) and the route to it (`mtr`)",
            )
        for probe, found in host.facts.items():
            # `gpus` reports a GPU tool that fails.
            if "error" in found and "tool" not in found:
                yield warning(
                    probe,
                    [host.name],
                    f"the probe failed: {found['error']}",
                    "the probe succeeds",
                    "try the same there by hand; a file system or a driver may hang",
                )
