"""Checks the network interfaces of the job's traffic, and InfiniBand ports."""

from __future__ import annotations

from collections.abc import Iterator

from dtrain.checks.evidence import Evidence, HostFacts
from dtrain.checks.finding import HOSTS, Finding, warning
from dtrain.checks.skew import outliers


def judge(evidence: Evidence) -> Iterator[Finding]:
    for host in evidence.hosts:
        if host.interfaces and host.chosen_interface is not None:
            yield from _chosen(host, host.chosen_interface)
            yield from _routes(host)
    yield from _differences(evidence)
    yield from _infiniband(evidence)


def _chosen(host: HostFacts, name: str) -> Iterator[Finding]:
    found = host.interfaces.get(name)
    key = f"cluster.overrides.{HOSTS}.interface"
    if found is None:
        usable = [
            other for other, one in host.interfaces.items() if one["addresses"] and other != "lo"
        ]
        yield host.error(
            "interface",
            f"interface {name} does not exist; available: {', '.join(usable) or 'none'}",
            f"interface {name}, as set in the cluster file",
            f"set {key}" + (f": {usable[0]}" if usable else ""),
        )
    elif not found["up"] or found["state"] == "down":
        yield host.error(
            "interface",
            f"interface {name} is down",
            f"{name} is up and has an address",
            f"sudo ip link set {name} up there, or set {key} to another interface",
        )
    elif not found["addresses"]:
        yield host.error(
            "interface",
            f"interface {name} has no IP address",
            f"{name} is up and has an address",
            f"add one (sudo ip addr add ADDRESS/PREFIX dev {name}), or set {key} to another"
            " interface",
        )


def _routes(host: HostFacts) -> Iterator[Finding]:
    """Finds addresses of other hosts that the kernel routes over another interface."""
    for found in host.dialed:
        # kube-proxy may repeat the host's address on an interface of its own.
        source = found.get("source")
        having = [name for name, one in host.interfaces.items() if source in one["addresses"]]
        if having and host.interface not in having:
            yield host.warning(
                "route",
                f"traffic to {found['address']} ({found['host']}) uses interface {having[0]}",
                f"it uses {host.interface}, as set in the cluster file",
                f"correct the address of {host.interface} or the routes there (`ip route get"
                f" {found['address']}`)",
            )


def _differences(evidence: Evidence) -> Iterator[Finding]:
    mtus: dict[str, str] = {}
    speeds: dict[str, str] = {}
    for host in evidence.hosts:
        found = host.interfaces.get(host.interface or "")
        if found is None or host.interface == "lo":
            continue
        if found["mtu"]:
            mtus[host.name] = f"MTU {found['mtu']}"
        if found["speed"]:
            speeds[host.name] = f"{found['speed'] / 1000:g} Gb/s"
    for outlier in outliers(mtus):
        name = evidence[outlier.hosts[0]].interface
        yield warning(
            "mtu",
            outlier.hosts,
            f"{name} has {outlier.seen}",
            "the same MTU on all hosts: otherwise large packets are lost",
            f"sudo ip link set dev {name} mtu {outlier.usual.split()[-1]} there",
        )
    for outlier in outliers(speeds):
        name = evidence[outlier.hosts[0]].interface
        yield warning(
            "network",
            outlier.hosts,
            f"{name} runs at {outlier.seen}",
            "the same speed on all hosts: the slowest link limits the job",
            f"check cable, transceiver and switch port (`ethtool {name}` there)",
        )


def _infiniband(evidence: Evidence) -> Iterator[Finding]:
    active: dict[str, str] = {}
    for host in evidence.hosts:
        if "infiniband" not in host.facts:
            continue
        ports = host.fact("infiniband")
        working = sorted(
            f"{port['rate']} Gb/s" for port in ports.values() if port["state"] == "ACTIVE"
        )
        active[host.name] = ", ".join(
            f"{working.count(rate)} × {rate}" for rate in dict.fromkeys(working)
        ) or ("no port active" if ports else "no RDMA device")
    for outlier in outliers(active):
        down = [
            f"{name} {port['state']}"
            for host in outlier.hosts
            for name, port in evidence[host].fact("infiniband").items()
            if port["state"] != "ACTIVE"
        ]
        yield warning(
            "infiniband",
            outlier.hosts,
            f"RDMA ports: {outlier.seen}" + (f" ({', '.join(sorted(set(down)))})" if down else ""),
            "the same active ports and rates on all hosts",
            "check cable, subnet manager and switch port (`ibstat` there)",
        )
