"""Checks TCP connections between hosts. Every host dials every other host, or some of many: see
`dtrain.session.facts.gather_order.peers`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from dtrain.checks.evidence import Evidence, Facts, is_loopback
from dtrain.checks.finding import Finding, error
from dtrain.checks.names import wrong_host
from dtrain.hostlist import fold
from dtrain.records import dataclass
from dtrain.spec.model import Rendezvous

_Pair = tuple[str, str]


def judge(evidence: Evidence) -> Iterator[Finding]:
    # A host may have been lost while others dialed it. That is reported for itself.
    here = {host.name for host in evidence.hosts}
    failed = [
        (host.name, found)
        for host in evidence.hosts
        for found in host.dialed
        if "error" in found
        and found["host"] in here
        and not _is_explained(evidence, host.name, found)
    ]
    yield from _others_answer(found for _, found in failed if found["error"] == "wrong")
    yield from _stalled(evidence, [one for one in failed if one[1]["error"] == "stalled"])
    blocked: dict[_Pair, str] = {}
    port_only: dict[tuple[str, int], dict[str, str]] = defaultdict(dict)
    refused = [one for one in failed if one[1]["error"] not in ("wrong", "stalled")]
    for source, found in refused:
        if found["kind"] != "port":
            blocked[source, found["host"]] = f"{found['address']}: {found['error']}"
    for source, found in refused:
        if found["kind"] == "port" and (source, found["host"]) not in blocked:
            port_only[found["host"], found["port"]][source] = found["error"]
    yield from _blocked(evidence, blocked)
    yield from _ports(port_only, evidence.plan.job.rendezvous)


def _is_explained(evidence: Evidence, source: str, found: Facts) -> bool:
    """Whether the cause is a name, which `names` reports, or an address that the job does not
    use, such as that of a gateway for the launching machine."""
    if found["kind"] == "interface":
        return False
    host = evidence[found["host"]]
    by_address = found["kind"] == "address"
    if by_address and not evidence.needs_address(host) and host.name in evidence[source].reached:
        return True
    names = evidence[source].fact("names").get("hosts", {})
    known = names.get(found["host"], {})
    addresses = known.get("addresses", ())
    return bool(
        "error" in known
        or any(map(is_loopback, addresses))
        or wrong_host(evidence, host, addresses)
    )


def _others_answer(wrong: Iterable[Facts]) -> Iterator[Finding]:
    for found in wrong:
        who = found.get("answered") or "another program than dtrain"
        yield error(
            "address",
            [found["host"]],
            f"{found['address']}, the address of {found['host']}, belongs to another machine:"
            f" {who} answered",
            f"{found['host']} answers at its address",
            f"correct cluster.overrides.{found['host']}.address",
        )


def _stalled(evidence: Evidence, stalled: list[tuple[str, Facts]]) -> Iterator[Finding]:
    pairs = {(source, found["host"]): found.get("mss", 0) for source, found in stalled}
    for group in groups([host.name for host in evidence.hosts], pairs, _dialed(evidence)):
        name = evidence[group.firsts[0]].interface or "the interface"
        yield error(
            "mtu",
            group.hosts,
            f"hosts can connect between {group}, but large packets do not arrive"
            f" (segments of {pairs[group.example]} bytes)",
            "packets of every size pass",
            "set the same MTU on these hosts and on the switches between them, such as"
            f" `sudo ip link set dev {name} mtu 1500`, and allow ICMP",
        )


def _blocked(evidence: Evidence, blocked: Mapping[_Pair, str]) -> Iterator[Finding]:
    for group in groups([host.name for host in evidence.hosts], blocked, _dialed(evidence)):
        first, second = group.example
        there = evidence[second].part.host.address
        here = evidence[first].part.host.address
        one_way = (second, first) not in blocked and group.seconds
        yield error(
            "network",
            group.hosts,
            f"no TCP connection between {group}: {first} dialed {blocked[group.example]}"
            + (f"; {second} can connect to {first}" if one_way else ""),
            "every host can connect to every other on all TCP ports: gloo and NCCL use any port",
            "allow TCP between them in the hosts' firewalls and in the cloud's security group;"
            f" with ufw on {second}: sudo ufw allow from {here}; on {first}: sudo ufw allow from"
            f" {there}",
        )


def _dialed(evidence: Evidence) -> set[_Pair]:
    return {(host.name, found["host"]) for host in evidence.hosts for found in host.dialed}


@dataclass(frozen=True, slots=True)
class HostGroup:
    """Each host of ``firsts`` fails with each host of ``seconds``, as far as they were tried."""

    firsts: tuple[str, ...]
    seconds: tuple[str, ...]
    """Empty if ``firsts`` fail with all other hosts."""
    example: _Pair

    @property
    def hosts(self) -> tuple[str, ...]:
        return self.firsts + self.seconds

    def __str__(self) -> str:
        there = fold(self.seconds) if self.seconds else "any other host"
        return f"{fold(self.firsts)} and {there}"


def groups(
    names: Sequence[str], failed: Collection[_Pair], tried: Collection[_Pair] | None = None
) -> Iterator[HostGroup]:
    """Combine failing pairs, of either direction, into few groups. Hosts that fail with all other
    hosts come first. ``tried``: the pairs that were tried, if not all.

    Ignores pairs of a host with itself and of hosts that are not in ``names``.
    """
    order = {name: place for place, name in enumerate(names)}
    pairs = {frozenset(pair) for pair in failed if pair[0] != pair[1] and order.keys() >= {*pair}}
    if not pairs:
        return
    known = None if tried is None else {frozenset(pair) for pair in tried}
    failures = Counter(name for pair in pairs for name in pair)

    def works(first: str, second: str) -> bool:
        pair = frozenset((first, second))
        return pair not in pairs and first != second and (known is None or pair in known)

    def example(first: str, others: Iterable[str]) -> _Pair:
        both = [pair for other in others for pair in ((first, other), (other, first))]
        return next(pair for pair in both if pair in failed)

    alone = [
        name
        for name in names
        if failures[name] > 1 and not any(works(name, other) for other in names)
    ]
    if len(alone) == len(names):
        yield HostGroup(tuple(alone), (), example(alone[0], alone[1:]))
        return
    for name in alone:
        yield HostGroup((name,), (), example(name, [other for other in names if other != name]))
    left = [sorted(pair, key=order.__getitem__) for pair in pairs if pair.isdisjoint(alone)]
    for firsts, seconds in _combined(sorted(left, key=lambda pair: order[pair[0]]), works):
        ordered = tuple(sorted(seconds, key=order.__getitem__))
        yield HostGroup(tuple(firsts), ordered, example(firsts[0], ordered))


def _combined(
    pairs: Iterable[Sequence[str]], works: Callable[[str, str], bool]
) -> list[tuple[list[str], set[str]]]:
    """Failing pairs as few groups of hosts of which none of the first ``works`` with one of the
    second."""
    partners: dict[str, set[str]] = defaultdict(set)
    for first, second in pairs:
        partners[first].add(second)
    found: list[tuple[list[str], set[str]]] = []
    for first, others in partners.items():
        for firsts, seconds in found:
            if first in seconds or not others.isdisjoint(firsts):
                continue
            apart = not any(works(first, one) for one in seconds - others)
            if apart and not any(works(a, b) for a in firsts for b in others - seconds):
                firsts.append(first)
                seconds |= others
                break
        else:
            found.append(([first], {*others}))
    return found


def _ports(
    failed: Mapping[tuple[str, int], Mapping[str, str]], rendezvous: Rendezvous
) -> Iterator[Finding]:
    first, last = rendezvous.ports
    for (host, port), sources in failed.items():
        reason = next(iter(sources.values()))
        if rendezvous.port is None:
            remedy = (
                f"open ports {first} to {last} on {host} (with ufw: sudo ufw allow"
                f" {first}:{last}/tcp), or set job.rendezvous.ports to an open range"
            )
        else:
            remedy = (
                f"open it on {host} (with ufw: sudo ufw allow {port}/tcp), or set"
                " job.rendezvous.port to an open one"
            )
        yield error(
            "network",
            [host, *sources],
            f"{fold(list(sources))} cannot connect to port {port} of {host} ({reason}), but can"
            " connect to its other ports",
            f"port {port}, which the job may listen on, is open",
            remedy,
        )
