"""Which hosts reach which over TCP: every host has dialed every other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from dtrain.check.evidence import Evidence, Facts, is_loopback
from dtrain.check.finding import Finding, error
from dtrain.check.names import leads_astray
from dtrain.check.skew import folded

Pair = tuple[str, str]


def judge(evidence: Evidence) -> Iterator[Finding]:
    failed = [
        (host.name, found)
        for host in evidence.hosts
        for found in host.dialed
        if "error" in found and not _is_explained(evidence, host.name, found)
    ]
    yield from _others_answer(found for _, found in failed if found["error"] == "wrong")
    yield from _stalled(evidence, [one for one in failed if one[1]["error"] == "stalled"])
    blocked: dict[Pair, str] = {}
    port_only: dict[tuple[str, int], dict[str, str]] = defaultdict(dict)
    refused = [one for one in failed if one[1]["error"] not in ("wrong", "stalled")]
    for source, found in refused:
        if found["kind"] != "port":
            blocked[source, found["host"]] = f"{found['address']}: {found['error']}"
    for source, found in refused:
        if found["kind"] == "port" and (source, found["host"]) not in blocked:
            port_only[found["host"], found["port"]][source] = found["error"]
    yield from _blocked(evidence, blocked)
    yield from _ports(port_only)


def _is_explained(evidence: Evidence, source: str, found: Facts) -> bool:
    """Whether the name alone is at fault, which `names` tells of."""
    if found["kind"] == "interface":
        return False
    names = evidence[source].fact("names").get("hosts", {})
    known = names.get(found["host"], {})
    addresses = known.get("addresses", ())
    return bool(
        "error" in known
        or any(map(is_loopback, addresses))
        or leads_astray(evidence, evidence[found["host"]], addresses)
    )


def _others_answer(wrong: Iterable[Facts]) -> Iterator[Finding]:
    for found in wrong:
        who = found["answered"] or "something that is not dtrain"
        yield error(
            "address",
            [found["host"]],
            f"{found['address']}, the address of {found['host']}, leads to another machine:"
            f" {who} answered",
            f"{found['host']} answers at its address",
            f"correct cluster.overrides.{found['host']}.address",
        )


def _stalled(evidence: Evidence, stalled: list[tuple[str, Facts]]) -> Iterator[Finding]:
    for source, found in stalled:
        name = evidence[source].interface or "the interface"
        yield error(
            "mtu",
            [source, found["host"]],
            f"{source} connects to {found['host']}, but large packets do not arrive"
            f" (segments of {found['mss']} bytes)",
            "packets of every size pass",
            f"set one MTU on both and on the switch between them: sudo ip link set dev {name}"
            " mtu 1500; and let ICMP pass",
        )


def _blocked(evidence: Evidence, blocked: Mapping[Pair, str]) -> Iterator[Finding]:
    """Each pair once; a host that fails with all others by itself."""
    pairs = {frozenset(pair) for pair in blocked}
    names = [host.name for host in evidence.hosts]
    alone = [
        name
        for name in names
        if len(names) > 2 and all({name, other} in pairs for other in names if other != name)
    ]
    # Where nobody reaches anybody no host is special.
    if len(alone) == len(names):
        yield _unreached(names, "no host reaches any other", blocked[next(iter(blocked))], "")
        return
    for name in alone:
        reasons = [reason for pair, reason in blocked.items() if name in pair]
        yield _unreached([name], f"no other host reaches {name}, or it none", reasons[0], name)
    partners: dict[str, set[str]] = defaultdict(set)
    for pair in pairs:
        if not pair & set(alone):
            first, second = sorted(pair, key=names.index)
            partners[first].add(second)
    groups: dict[frozenset[str], list[str]] = defaultdict(list)
    for first in sorted(partners, key=names.index):
        groups[frozenset(partners[first])].append(first)
    for seconds, firsts in groups.items():
        those = sorted(seconds, key=names.index)
        first, second = firsts[0], those[0]
        forth, back = blocked.get((first, second)), blocked.get((second, first))
        here, there = folded(firsts), folded(those)
        if forth and back:
            said = f"{here} and {there} do not reach each other"
        else:
            said = f"{here} does not reach {there}" if forth else f"{there} does not reach {here}"
        address = evidence[firsts[0]].part.host.address
        yield _unreached([*firsts, *those], said, forth or back or "", address)


def _unreached(hosts: list[str], said: str, reason: str, source: str) -> Finding:
    rule = f" on the other (with ufw: sudo ufw allow from {source})" if source else ""
    return error(
        "network",
        hosts,
        f"{said} ({reason})",
        "every host reaches every other at all TCP ports: gloo and NCCL choose them freely",
        f"allow TCP between these hosts in their firewalls and in the cloud's security group{rule}",
    )


def _ports(failed: Mapping[tuple[str, int], Mapping[str, str]]) -> Iterator[Finding]:
    for (host, port), sources in failed.items():
        reason = next(iter(sources.values()))
        yield error(
            "network",
            [host, *sources],
            f"{folded(list(sources))} does not reach port {port} of {host} ({reason}); other ports"
            " of it are reached",
            f"port {port}, which the job listens on, is open",
            f"open it on {host} (with ufw: sudo ufw allow {port}/tcp), or set"
            " job.rendezvous.port to an open one",
        )
