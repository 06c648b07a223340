"""Hosts that are unreachable, answer slowly, or have failed probes."""

from __future__ import annotations

from collections.abc import Iterator

from dtrain.checks.evidence import Evidence
from dtrain.checks.finding import Finding, error, warning

SLOW = 1.0
"""Round trip in seconds above which launches are slow."""


def judge(evidence: Evidence) -> Iterator[Finding]:
    # Slurm starts dtrain's program on its machines; SSH leads to the login node alone.
    chosen = set(evidence.plan.host_names if evidence.plan.slurm else ())
    for failure in evidence.failures:
        yield error(
            "machines" if failure.host in chosen else "ssh",
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
