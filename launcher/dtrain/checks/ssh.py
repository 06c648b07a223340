"""Hosts that are unreachable, answer slowly, or have failed probes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dtrain.checks.evidence import Evidence
from dtrain.checks.finding import Finding, error, warning
from dtrain.diagnostics import HostKeyError, NodeError
from dtrain.failures.cause import of_one_kind, shown_for, with_one_hint

SLOW = 1.0
"""Round trip in seconds above which launches are slow."""


def judge(evidence: Evidence) -> Iterator[Finding]:
    all_hosts = [part.host for part in evidence.plan.hosts]
    keys = [failure for failure in evidence.failures if isinstance(failure, HostKeyError)]
    others = [failure for failure in evidence.failures if not isinstance(failure, HostKeyError)]
    for same in of_one_kind(others, all_hosts):
        seen = f"{_text(same[0])}{shown_for(same[0].host, same)}"
        yield _unusable(evidence, same, seen, same[0].hint)
    # A person compares the fingerprints of all hosts.
    for alike in with_one_hint(keys, all_hosts):
        remedy = f"{alike[0].hint}{shown_for(alike[0].host, alike)}"
        yield _unusable(evidence, alike, "; ".join(map(_text, alike)), remedy)
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


def _text(failure: NodeError) -> str:
    return f"{failure.attempted}: {failure.reason}"


def _unusable(evidence: Evidence, failures: Sequence[NodeError], seen: str, remedy: str) -> Finding:
    hosts = [failure.host for failure in failures]
    # Slurm starts dtrain's program on its machines; SSH leads to the login node alone.
    machine = evidence.plan.slurm and hosts[0] in evidence.plan.host_names
    return error(
        "machines" if machine else "ssh",
        hosts,
        seen,
        "dtrain can run Python on every host",
        remedy.replace("\n", "; "),
    )
