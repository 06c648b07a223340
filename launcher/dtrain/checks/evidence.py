"""What is known when `dtrain check` judges: the plan, and what every host said. Pure data."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from dtrain.diagnostics import NodeError
from dtrain.launchplan.plan import HostPlan, LaunchPlan
from dtrain.spec.model import Host

Facts = Mapping[str, Any]


@dataclass(frozen=True)
class HostFacts:
    """One host that answered. ``facts`` is what `dtrain.node.facts` gathers, by probe; a probe
    that failed has ``{"error": reason}``, and one that was not asked for is missing."""

    part: HostPlan
    facts: Facts
    dialed: tuple[Facts, ...] = ()
    """What came of dialing the other hosts, one entry for each address and port."""
    latency: float = 0.0
    """Seconds of the quickest round trip over the SSH connection."""
    clock_offset: float = 0.0
    """Seconds by which the host's clock is ahead of the launching machine's."""
    clock_error: float = 0.0
    """Seconds by which ``clock_offset`` may be wrong."""

    @property
    def host(self) -> Host:
        return self.part.host

    @property
    def name(self) -> str:
        return self.part.host.name

    def fact(self, probe: str) -> Facts:
        """What a probe found; empty if it failed or was not asked for."""
        found = self.facts.get(probe, {})
        return {} if "error" in found else found

    def short(self, path: str) -> str:
        """A path there, with ``~`` for the home folder: what homes of several names have in
        common is told once."""
        home = self.fact("machine").get("home")
        if home and home != "/" and (path == home or path.startswith(f"{home}/")):
            return f"~{path.removeprefix(home)}"
        return path

    @property
    def machine(self) -> tuple[Any, Any] | None:
        """Names the machine, as far as ports and addresses go: two hosts with the same one are
        one. Containers on one machine with networks of their own are several."""
        found = self.fact("machine")
        return (found["boot"], found["network"]) if found.get("boot") else None

    @property
    def chosen_interface(self) -> str | None:
        """The interface that the cluster file names for this host."""
        environment = self.part.environment
        named = self.part.host.interface or environment.get(
            "GLOO_SOCKET_IFNAME", environment.get("NCCL_SOCKET_IFNAME")
        )
        # NCCL also takes lists, prefixes and exclusions, which name no one interface.
        return None if named is None or any(sign in named for sign in "^=,") else named

    @property
    def interfaces(self) -> Facts:
        found: Facts = self.fact("network").get("interfaces", {})
        return found

    @cached_property
    def addresses(self) -> frozenset[str]:
        """All IP addresses of the host, loopback left out."""
        return frozenset(
            address
            for found in self.interfaces.values()
            for address in found["addresses"]
            if not is_loopback(address)
        )

    @cached_property
    def interface(self) -> str | None:
        """The interface for the job's traffic: the chosen one, or where most routes lead."""
        if self.chosen_interface is not None:
            return self.chosen_interface if self.chosen_interface in self.interfaces else None
        routes = Counter(self.fact("network").get("routes", {}).values())
        routes.pop(None, None)
        return routes.most_common(1)[0][0] if routes else None

    @property
    def interface_address(self) -> str | None:
        """The first address of `interface`."""
        addresses = self.interfaces.get(self.interface or "", {}).get("addresses") or [None]
        first: str | None = addresses[0]
        return first


@dataclass(frozen=True)
class Evidence:
    plan: LaunchPlan
    hosts: tuple[HostFacts, ...]
    """Those that answered, in node-rank order."""
    failures: tuple[NodeError, ...] = ()
    """Why the others did not."""
    script_in_source: bool | None = None
    """Whether the folder that ``job.sync`` would send holds the script; None if nothing is sent."""
    rehearsal: Mapping[str, tuple[Facts, ...]] = field(default_factory=dict)
    """What the ranks or tasks of each host said of a rehearsal; empty if there was none."""
    bandwidth: Mapping[str, tuple[Facts, ...]] = field(default_factory=dict)
    """What the ranks of each host measured; empty if nothing was."""

    def needs_address(self, host: HostFacts) -> bool:
        """Whether the job reaches the host by the address in the cluster file. gloo and NCCL
        tell each other addresses of interfaces, once they have met on the first host; c10d may
        have them meet anywhere."""
        job = self.plan.job
        first = host.part.node_rank == 0
        return first or job.framework != "torch" or job.rendezvous.backend == "c10d"

    def __getitem__(self, name: str) -> HostFacts:
        return next(host for host in self.hosts if host.name == name)


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False
