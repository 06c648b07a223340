"""Checks that every host can resolve the address of every other host in the cluster file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dtrain.checks.evidence import Evidence, Facts, HostFacts, is_loopback
from dtrain.checks.finding import Finding

SLOW_REVERSE = 2.0
"""Seconds for a reverse lookup, which PyTorch's rendezvous makes."""


def judge(evidence: Evidence) -> Iterator[Finding]:
    for host in evidence.hosts:
        resolved = host.fact("names").get("hosts", {})
        for peer in evidence.hosts:
            if peer.name in resolved and not _same(host, peer):
                yield from _peer(evidence, host, peer, resolved[peer.name])
        yield from _own(evidence, host)
        seconds = host.fact("names").get("reverse_seconds", 0.0)
        if seconds > SLOW_REVERSE:
            first = evidence.plan.hosts[0].host
            yield host.warning(
                "names",
                f"the reverse lookup of {first.name}'s address takes {seconds:.0f} s",
                "an immediate answer: every connection to the rendezvous makes this lookup",
                f"add {first.name} and its address to /etc/hosts there, or correct the name"
                " servers in /etc/resolv.conf",
            )


def _same(host: HostFacts, peer: HostFacts) -> bool:
    """Whether both are known to be one machine."""
    return peer is host or (peer.machine is not None and peer.machine == host.machine)


def _own(evidence: Evidence, host: HostFacts) -> Iterator[Finding]:
    """JAX's collectives on CPUs tell other hosts the address of the host's own name, and take no
    other."""
    alone = all(_same(host, peer) for peer in evidence.hosts)
    if evidence.plan.job.framework != "jax" or host.part.host.gpus or alone:
        return
    own = host.fact("names").get("own", {}).get("addresses", ())
    if own and all(map(is_loopback, own)):
        yield host.warning(
            "names",
            f"the host's own name leads to {', '.join(own)}: JAX's collectives on CPUs use that"
            " address, which no other host can reach",
            "the host's own name leads to an address that the other hosts reach",
            f"in /etc/hosts there, give the name {host.interface_address or 'its IP address'}"
            f" instead of {own[0]}",
        )


def _peer(evidence: Evidence, host: HostFacts, peer: HostFacts, found: Facts) -> Iterator[Finding]:
    """``found``: what the host resolves the address of ``peer`` to."""
    address = peer.part.host.address
    # Where no name resolves, there are no routes, and so no interface.
    theirs = peer.interface_address or peer.ssh_address or "its IP address"
    judged = host.error if evidence.needs_address(peer) else host.warning
    override = f"set cluster.overrides.{peer.name}.address: {theirs}"
    if "error" in found:
        yield judged(
            "names",
            f"cannot resolve {address}, the address of {peer.name}: {found['error']}",
            "every host can resolve the address of every other host",
            f"{override}, or add the line `{theirs} {address}` to /etc/hosts there",
        )
    elif all(map(is_loopback, found["addresses"])):
        leads = ", ".join(found["addresses"])
        written = "" if is_loopback(address) else ", or correct the line for it in /etc/hosts there"
        yield judged(
            "names",
            f"{address}, the address of {peer.name}, resolves to the host itself ({leads})",
            f"an address of {peer.name}",
            f"{override}{written}",
        )
    elif other := wrong_host(evidence, peer, found["addresses"]):
        yield judged(
            "names",
            f"{address}, the address of {peer.name}, resolves to {other}"
            f" ({', '.join(found['addresses'])})",
            f"an address of {peer.name}",
            f"{override}, or correct its entry in /etc/hosts there or in the name server",
        )


def wrong_host(evidence: Evidence, peer: HostFacts, addresses: Sequence[str]) -> str:
    """The other host that has all of ``addresses`` if ``peer`` has none of them; else empty."""
    wanted = set(addresses)
    if not wanted or wanted & peer.addresses:
        return ""
    owners = evidence.owners.get(min(wanted), ())
    return next((host.name for host in owners if wanted <= host.addresses), "")
