"""The input of the checks: the launch plan and the facts of each host. Pure data."""

from __future__ import annotations

import ipaddress
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property
from typing import Any

from dtrain.checks.finding import HOSTS, Finding, error, warning
from dtrain.diagnostics import NodeError
from dtrain.launchplan.plan import HostPlan, LaunchPlan
from dtrain.records import dataclass
from dtrain.spec.model import Host

Facts = Mapping[str, Any]


@dataclass(frozen=True)
class HostFacts:
    """One host that answered.

    ``facts`` holds the results of `dtrain.node.facts` by probe. A failed probe has
    ``{"error": reason}``. A probe that was not requested is missing.
    """

    part: HostPlan
    facts: Facts
    dialed: tuple[Facts, ...] = ()
    """The results of dialing the other hosts, one for each address and port."""
    latency: float = 0.0
    """The fastest round trip over the SSH connection, in seconds."""
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

    def error(self, subject: str, seen: str, expected: str, remedy: str) -> Finding:
        """A finding about this host."""
        return error(subject, [self.name], seen, expected, remedy)

    def warning(self, subject: str, seen: str, expected: str, remedy: str) -> Finding:
        """A finding about this host."""
        return warning(subject, [self.name], seen, expected, remedy)

    def fact(self, probe: str) -> Facts:
        """The result of a probe; empty if it failed or was not requested."""
        found = self.facts.get(probe, {})
        return {} if "error" in found else found

    @cached_property
    def reached(self) -> frozenset[str]:
        """The hosts whose interface this host has dialed."""
        return frozenset(
            one["host"] for one in self.dialed if one["kind"] == "interface" and "error" not in one
        )

    def short(self, path: str) -> str:
        """A path on the host, with ``~`` for the home folder, so that hosts with different home
        folders share one finding."""
        home = self.fact("machine").get("home")
        if home and home != "/" and (path == home or path.startswith(f"{home}/")):
            return f"~{path.removeprefix(home)}"
        return path

    @property
    def machine(self) -> tuple[Any, Any] | None:
        """Identifies the machine's network: two hosts with the same value share ports and
        addresses. Containers with separate networks on one machine differ."""
        found = self.fact("machine")
        return (found["boot"], found["network"]) if found.get("boot") else None

    @cached_property
    def chosen_interface(self) -> str | None:
        """The interface that the cluster file sets for this host."""
        environment = self.part.environment
        named = self.part.host.interface or environment.get(
            "GLOO_SOCKET_IFNAME", environment.get("NCCL_SOCKET_IFNAME")
        )
        # NCCL also accepts lists, prefixes and exclusions, which match several interfaces.
        return None if named is None or any(sign in named for sign in "^=,") else named

    @property
    def interfaces(self) -> Facts:
        found: Facts = self.fact("network").get("interfaces", {})
        return found

    @cached_property
    def addresses(self) -> frozenset[str]:
        """All IP addresses of the host, without loopback."""
        return frozenset(
            address
            for found in self.interfaces.values()
            for address in found["addresses"]
            if not is_loopback(address)
        )

    @cached_property
    def interface(self) -> str | None:
        """The interface for the job's traffic: the chosen one, or the one of most routes."""
        if self.chosen_interface is not None:
            return self.chosen_interface if self.chosen_interface in self.interfaces else None
        routes = Counter(self.fact("network").get("routes", {}).values())
        routes.pop(None, None)
        return routes.most_common(1)[0][0] if routes else None

    @cached_property
    def interface_address(self) -> str | None:
        """The first address of `interface`."""
        addresses = self.interfaces.get(self.interface or "", {}).get("addresses") or [None]
        first: str | None = addresses[0]
        return first

    @property
    def ssh_address(self) -> str | None:
        """The address at which SSH reached the host, as the host knows it: behind a jump host, its
        address there."""
        found: str | None = self.fact("network").get("ssh_address")
        return None if found is None or is_loopback(found) else found


@dataclass(frozen=True)
class Evidence:
    plan: LaunchPlan
    hosts: tuple[HostFacts, ...]
    """The hosts that answered, in node-rank order."""
    failures: tuple[NodeError, ...] = ()
    """The errors of the hosts that did not answer."""
    script_in_source: bool | None = None
    """Whether the folder of ``job.sync`` contains the script; None if it sends none."""
    launcher: str | None = None
    """The launcher that ``job.command``, or the shell script in the folder of ``job.sync``, starts,
    such as ``torchrun``. None if the hosts have the script."""
    rehearsal: Mapping[str, tuple[Facts, ...]] = field(default_factory=dict)
    """The reports of each host's ranks or tasks on a rehearsal; empty without a rehearsal."""
    bandwidth: Mapping[str, tuple[Facts, ...]] = field(default_factory=dict)
    """The measurements of each host's ranks; empty without a measurement."""
    request: tuple[Finding, ...] = ()
    """What is wrong with the file's request to an engine that chooses the hosts."""

    @classmethod
    def without_hosts(
        cls,
        plan: LaunchPlan,
        *,
        failures: Iterable[NodeError] = (),
        request: Iterable[Finding] = (),
    ) -> Evidence:
        """What is known before an engine has chosen any host."""
        return cls(replace(plan, hosts=()), (), tuple(failures), request=tuple(request))

    def needs_address(self, host: HostFacts) -> bool:
        """Whether the job connects to the host by its address in the cluster file.

        gloo and NCCL connect to the first host and then exchange the addresses of their
        interfaces. With c10d any host may be the meeting point.
        """
        job = self.plan.job
        first = host.part.node_rank == 0
        return first or job.framework != "torch" or job.rendezvous.backend == "c10d"

    @property
    def send(self) -> str:
        """A remedy for files that are missing on hosts, for the end of a sentence."""
        if self.plan.slurm is not None:
            return "put the code in a folder that all machines share"
        return "set job.sync so that a launch sends it"

    @property
    def python_key(self) -> str:
        """The key of the cluster file that sets the Python of the hosts of a finding."""
        if self.plan.slurm is not None:
            return "cluster.python"
        return f"cluster.overrides.{HOSTS}.python"

    @property
    def remove(self) -> str:
        """A remedy: keep the job off the hosts of a finding."""
        if self.plan.slurm is not None:
            return f"keep the job off them with cluster.slurm.options: ['--exclude={HOSTS}']"
        return "remove these hosts from cluster.hosts"

    def __getitem__(self, name: str) -> HostFacts:
        return self._by_name[name]

    @cached_property
    def owners(self) -> Mapping[str, Sequence[HostFacts]]:
        """The hosts that have an address."""
        found = defaultdict[str, list[HostFacts]](list)
        for host in self.hosts:
            for address in host.addresses:
                found[address].append(host)
        return found

    @cached_property
    def _by_name(self) -> Mapping[str, HostFacts]:
        return {host.name: host for host in self.hosts}


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False
