"""The time of collectives between GPUs."""

from __future__ import annotations

import math

from dtrain.parallelism.cluster.efficiency import Efficiency
from dtrain.parallelism.cluster.hardware import GpuCluster
from dtrain.records import dataclass


@dataclass(frozen=True, slots=True)
class Group:
    """``size`` ranks, each ``stride`` apart, that exchange data."""

    cluster: GpuCluster
    efficiency: Efficiency
    size: int
    stride: int

    @property
    def local(self) -> int:
        """Number of members that the link joins: in one host, or in one rack (NVL72)."""
        # If hosts do not hold whole groups, the most divided group is the slowest.
        return math.gcd(self.size, max(1, self.cluster.joined // self.stride))

    @property
    def within_host(self) -> bool:
        return self.local == self.size

    @property
    def bandwidth(self) -> float:
        """Bytes/s of a ring through each member.

        Across hosts, all groups in one host share its NICs. If the link joins several hosts, the
        channels of a ring leave them through the NICs of all of them (NCCL treats such hosts as one
        node: ``NCCL_MNNVL_ENABLE``).
        """
        link = self._link
        if self.within_host:
            return link
        wire = self._wire_of_joined * 1e9 / min(self.stride, self.cluster.joined)
        return min(link, wire * self.efficiency.network)

    @property
    def _link(self) -> float:
        """Bytes/s of each member to the others in its host."""
        return self.cluster.gpu.link_among(self.local) * 1e9 * self.efficiency.link

    @property
    def _crosses_racks(self) -> bool:
        rack = self.cluster.rack_hosts * self.cluster.gpus_per_host
        return 0 < rack < self.size * self.stride

    @property
    def _wire(self) -> float:
        """GB/s of one host to the next member's host.

        A ring leaves each rack once. So hosts of one rack share its way out only if they belong to
        different rings, or to the same pipeline stage: those within one stride.
        """
        cluster = self.cluster
        if not self._crosses_racks:
            return cluster.network
        leaving = min(max(1.0, self.stride / cluster.gpus_per_host), cluster.rack_hosts)
        return min(cluster.network, cluster.between_racks * cluster.rack_hosts / leaving)

    @property
    def _wire_of_joined(self) -> float:
        """GB/s of all hosts that one link joins, together."""
        cluster = self.cluster
        every = self._wire * max(1.0, cluster.joined / cluster.gpus_per_host)
        if self._crosses_racks:
            every = min(every, max(self._wire, cluster.between_racks * cluster.rack_hosts))
        return every

    def all_gather(self, size: float) -> float:
        """Return the seconds of an all-gather of ``size`` bytes in total.

        Ring: (n−1)/n · V/B (NCCL's bus bandwidth); a reduce-scatter takes as long. NCCL has trees
        for all-reduces only, so the start of the others grows with the number of members.
        """
        if self.size == 1 or not size:
            return 0.0
        return self.efficiency.ring_start(self.size, self.hosts) + self._pass(size)

    def all_reduce(self, size: float) -> float:
        """Return the seconds of an all-reduce of ``size`` bytes: there and back."""
        if self.size == 1 or not size:
            return 0.0
        return 2 * (self.efficiency.tree_start(self.size, self.hosts) + self._pass(size))

    @property
    def hosts(self) -> float:
        return self.size / self.local

    def _pass(self, size: float) -> float:
        return (self.size - 1) / self.size * size / self.bandwidth

    def exchange(self, size: float, copies: int) -> float:
        """Return the seconds in which every member sends ``copies`` of its ``size`` bytes to
        members at random, as tokens go to experts.

        A host receives one copy, which its members share over the link (DeepSeek-V3, arXiv
        2412.19437, section 3.2.2).
        """
        if self.size == 1 or not size:
            return 0.0
        parts = self.size / self.local
        # Of ``copies`` random hosts, the expected number that differ, without the sender's own.
        others = (parts - 1) * (1 - (1 - 1 / parts) ** copies)
        wire = self.cluster.network * 1e9 * self.efficiency.exchange / self.cluster.gpus_per_host
        near = size * copies * (self.local - 1) / self.local / self._link
        seconds = max(near, size * others / wire)
        if self._crosses_racks:
            rack = self.cluster.rack_hosts * self.cluster.gpus_per_host
            here = max(1.0, rack / self.stride / self.local)
            far = size * others * (parts - here) / (parts - 1)
            seconds = max(seconds, far / wire * self.cluster.network / self.cluster.between_racks)
        return self.efficiency.latency + seconds

    def send(self, size: float) -> float:
        """Return the seconds in which one member sends ``size`` bytes to the next."""
        if self.size == 1 or not size:
            return 0.0
        if self.within_host:
            return self.efficiency.latency + size / (self.cluster.gpu.link_among(2) * 1e9 * 0.7)
        wire = self._wire * 1e9 * self.efficiency.network / self.cluster.gpus_per_host
        return self.efficiency.latency + size / wire


def exposed(traffic: float, busy: float, share: float) -> float:
    """Return the seconds that ``traffic`` adds to ``busy`` seconds of computation beside it. While
    both run, a second of traffic adds ``share`` seconds."""
    return traffic - (1 - share) * min(traffic, busy)
