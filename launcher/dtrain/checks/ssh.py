"""Hosts that are unreachable, answer slowly, or have failed probes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dtrain.checks.evidence import Evidence
from dtrain.checks.finding import Finding, error
from dtrain.diagnostics import HostKeyError, NodeError
from dtrain.failures.alike import common_hint, common_text, of_one_kind, with_one_hint

SLOW = 1.0
"""Round trip in seconds above which launches are slow."""


def judge(evidence: Evidence) -> Iterator[Finding]:
    all_hosts = [part.host for part in evidence.plan.hosts]
    kinds = {same[0]: same for same in of_one_kind(evidence.failures, all_hosts)}
    keys: list[NodeError] = [first for first in kinds if isinstance(first, HostKeyError)]
    # A person compares the fingerprints of all hosts, which differ.
    together = with_one_hint(keys, all_hosts)
    together += [[first] for first in kinds if not isinstance(first, HostKeyError)]
    for firsts in together:
        yield _unusable(evidence, [kinds[first] for first in firsts])
    for host in evidence.hosts:
        if host.latency > SLOW:
            yield host.warning(
                "ssh",
                f"the fastest of several round trips took {host.latency:.1f} s",
                "round trips of less than 1 s",
                "check the load of that host (`uptime`) and the route to it (`mtr`)",
            )
        for probe, found in host.facts.items():
            # `gpus` reports a GPU tool that fails.
            if "error" in found and "tool" not in found:
                yield host.warning(
                    probe,
                    f"the probe failed: {found['error']}",
                    "the probe succeeds",
                    "try the same there by hand; a file system or a driver may hang",
                )


def _unusable(evidence: Evidence, kinds: Sequence[Sequence[NodeError]]) -> Finding:
    """``kinds``: failures with one hint, by `of_one_kind`."""
    hosts = [failure.host for same in kinds for failure in same]
    subject, expected = "ssh", "dtrain can run Python on every host"
    if evidence.plan.kubernetes:
        subject, expected = "kubernetes", "the API server answers"
    elif evidence.plan.slurm and hosts[0] in evidence.plan.host_names:
        subject = "machines"  # Slurm reaches them: SSH leads to the login node alone
    return error(
        subject,
        hosts,
        "; ".join(map(common_text, kinds)),
        expected,
        common_hint([same[0] for same in kinds]).replace("\n", "; "),
    )
