"""The measured bandwidth of the fabric, and slow links and hosts. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

from dtrain.checks.evidence import Evidence, Facts
from dtrain.checks.finding import Finding, error, warning
from dtrain.checks.reach import groups
from dtrain.records import dataclass

SLOW = 0.5
"""A link with less than this share of the usual bandwidth is slow."""
CALIBRATION = 1
"""Schema of `dtrain.parallelism.cluster.calibration`."""


@dataclass(frozen=True, slots=True)
class Collective:
    """One all-reduce of ``size`` bytes on each rank."""

    hosts: int
    ranks: int
    size: int
    seconds: float

    @property
    def bus(self) -> float:
        """Bus bandwidth per rank in bytes per second, as nccl-tests defines it."""
        return 2 * (self.ranks - 1) / self.ranks * self.size / self.seconds


@dataclass(frozen=True, slots=True)
class MeasuredFabric:
    backend: str
    collectives: tuple[Collective, ...]
    links: Mapping[tuple[str, str], float]
    """Bytes per second from one host to another, with the largest messages."""

    @property
    def usual(self) -> float:
        """The usual bandwidth of a link: the median over hosts of each host's best link.

        Best links, because one slow host among three is on two of the three links.
        """
        best: dict[str, float] = {}
        for pair, rate in self.links.items():
            for host in pair:
                best[host] = max(rate, best.get(host, 0.0))
        return median(best.values()) if best else 0.0

    @property
    def slow(self) -> dict[tuple[str, str], float]:
        return {pair: rate for pair, rate in self.links.items() if rate < SLOW * self.usual}


def fabric(evidence: Evidence) -> MeasuredFabric | None:
    """The measurements; None if there are none or a rank failed."""
    reports = [report for answers in evidence.bandwidth.values() for report in answers]
    if not reports or any(report["failed"] for report in reports):
        return None
    host_of = {r["rank"]: host for host, answers in evidence.bandwidth.items() for r in answers}
    collectives: list[Collective] = []
    ranks, hosts = len(reports), len(evidence.bandwidth)
    if ranks > 1:
        times = [dict(report["all"]) for report in reports]
        collectives += [
            Collective(hosts, ranks, size, max(measured[size] for measured in times))
            for size in times[0]
            if all(size in measured for measured in times)
        ]
    if hosts > 1:
        collectives += _inside(evidence.bandwidth)
    links: dict[tuple[str, str], float] = {}
    for report in reports:
        for one, other, size, seconds in sorted(report["pairs"], key=lambda pair: pair[2]):
            pair = host_of.get(one, ""), host_of.get(other, "")
            if all(pair):
                links[pair] = size / seconds
    return MeasuredFabric(reports[0]["backend"], tuple(collectives), links)


def _inside(answers: Mapping[str, tuple[Facts, ...]]) -> Iterator[Collective]:
    """All-reduces among the ranks of one host. Each is the slowest over all hosts."""
    measured: dict[tuple[int, int], float] = {}
    for reports in answers.values():
        for report in reports:
            for size, seconds in report["inside"]:
                key = len(reports), size
                measured[key] = max(seconds, measured.get(key, 0.0))
    for (ranks, size), seconds in measured.items():
        yield Collective(1, ranks, size, seconds)


def calibration(found: MeasuredFabric) -> dict[str, Any]:
    """The input of `dtrain plan --calibrate`."""
    return {
        "schema": CALIBRATION,
        "collectives": [
            {
                "kind": "all_reduce",
                "ranks": one.ranks,
                "hosts": one.hosts,
                "bytes": one.size,
                "seconds": one.seconds,
            }
            for one in found.collectives
        ],
    }


def judge(evidence: Evidence) -> Iterator[Finding]:
    for host, answers in evidence.bandwidth.items():
        for report in answers:
            if report["failed"]:
                yield error(
                    "bandwidth",
                    [host],
                    f"the measurement of a rank failed: {report['error']}",
                    "all ranks take part",
                    "find the hosts that cannot connect: dtrain check FILE --rendezvous",
                )
    found = fabric(evidence)
    if found is None:
        return
    for group in groups([host.name for host in evidence.hosts], found.slow):
        rate = found.links[group.example]
        yield warning(
            "bandwidth",
            group.hosts,
            f"slow between {group}: {rate / 1e9:.3g} GB/s from {group.example[0]} to"
            f" {group.example[1]}; other links have {found.usual / 1e9:.3g} GB/s",
            "all links have the same speed: the slowest one limits every step",
            "check link speed, errors and the switch port (`ethtool INTERFACE`, `ip -s link`,"
            " `ibstat`), and other jobs on these hosts",
        )
