"""Checks that machines are distinct, similar, and free for the job."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations
from shlex import quote

from dtrain.checks.evidence import Evidence, HostFacts
from dtrain.checks.finding import Finding, error, warning
from dtrain.checks.sizes import GIB, in_words
from dtrain.checks.skew import outliers
from dtrain.wording import counted, plural


def judge(evidence: Evidence) -> Iterator[Finding]:
    yield from _one_machine_twice(evidence)
    yield from _one_name_twice(evidence)
    yield from _architecture(evidence)
    for host in evidence.hosts:
        yield from _memory(host)
        yield from _leftovers(host)
        yield from _cores(host)
    yield from _processors(evidence)


def _one_machine_twice(evidence: Evidence) -> Iterator[Finding]:
    for first, second in _alike(evidence.hosts):
        local = {first.part.host.transport, second.part.host.transport} == {"local"}
        shared = set(_uuids(first)) & set(_uuids(second))
        same = first.machine is not None and first.machine == second.machine
        if shared or (same and not local):
            what = "are the same machine" if same else f"share {counted(len(shared), 'GPU')}"
            judged = error if shared or _claims(first) & _claims(second) else warning
            yield judged(
                "hosts",
                [first.name, second.name],
                f"{first.name} and {second.name} {what}",
                "every host of the cluster is a separate machine",
                f"remove one of them from cluster.hosts, or correct cluster.overrides"
                f".{second.name}.address",
            )


def _alike(hosts: Sequence[HostFacts]) -> list[tuple[HostFacts, HostFacts]]:
    """The pairs of hosts that have a machine or a GPU in common."""
    owners: dict[object, list[int]] = defaultdict(list)
    for place, host in enumerate(hosts):
        for identity in {host.machine, *_uuids(host)} - {None}:
            owners[identity].append(place)
    pairs = {pair for places in owners.values() for pair in combinations(places, 2)}
    return [(hosts[first], hosts[second]) for first, second in sorted(pairs)]


def _claims(host: HostFacts) -> set[tuple[str, int]]:
    """GPUs and ports of a machine that only one host may have."""
    gpus = {("gpu", index) for index in host.part.host.gpus}
    return gpus | {("port", port) for port in host.part.ports}


def _uuids(host: HostFacts) -> Iterator[str]:
    for gpu in host.fact("gpus").get("gpus", ()):
        if gpu.get("uuid") and gpu["index"] in host.part.host.gpus:
            yield gpu["uuid"]


def _one_name_twice(evidence: Evidence) -> Iterator[Finding]:
    """Finds hosts that share a name and a kernel (mostly containers). NCCL treats them as one
    machine."""
    by_name: dict[str, list[HostFacts]] = {}
    for host in evidence.hosts:
        name = host.fact("machine").get("hostname")
        if name:
            by_name.setdefault(name, []).append(host)
    for name, hosts in by_name.items():
        if len({host.machine for host in hosts}) < 2:
            continue
        one_kernel = len({host.machine[0] for host in hosts if host.machine}) < len(hosts)
        judged = error if one_kernel and any(host.part.host.gpus for host in hosts) else warning
        why = "NCCL treats them as one machine" if one_kernel else "their logs look the same"
        yield judged(
            "hosts",
            [host.name for host in hosts],
            f"all of them have the host name {name}",
            f"each has its own host name: {why}",
            "sudo hostnamectl set-hostname NAME on all but one (for containers: --hostname)",
        )


def _architecture(evidence: Evidence) -> Iterator[Finding]:
    found = {host.name: host.fact("machine").get("architecture", "") for host in evidence.hosts}
    for outlier in outliers({name: kind for name, kind in found.items() if kind}):
        yield outlier.warning(
            "hosts",
            "the same processor architecture on all hosts: otherwise environments and results"
            " differ",
            f"{evidence.remove}, or set {evidence.python_key}",
        )


def _memory(host: HostFacts) -> Iterator[Finding]:
    found = host.fact("memory")
    if not found:
        return
    total = min(found["total"], found.get("limit", found["total"]))
    workers = max(1, sum(process.ranks for process in host.part.processes))
    if found["available"] < GIB * min(workers, 8) // 2:
        yield host.warning(
            "memory",
            f"{in_words(found['available'])} of {in_words(total)} are available"
            f" for {counted(workers, 'worker')}",
            "at least 512 MiB for each worker",
            "find the processes that use it (`ps aux --sort=-rss | head`) and stop them",
        )


def _leftovers(host: HostFacts) -> Iterator[Finding]:
    found = host.fact("leftovers")
    # A launch does not search all processes. Jobs without GPUs share a host without harm.
    running = host.fact("machine").get("runs", ()) if host.part.host.gpus else ()
    for run in running:
        if run not in found:
            yield host.warning(
                "processes",
                f"run {run} is running there, and may use the same GPUs",
                "no other job on these GPUs",
                f"if it is not needed: dtrain stop {quote(_launched(run))}, where it was launched",
            )
    for run, pids in found.items():
        # Without their numbers, hosts share the finding.
        variable = quote(f"DTRAIN_RUN_ID={run}")
        find = f"grep -lszxF {variable} /proc/[0-9]*/environ | cut -d/ -f3"
        yield host.warning(
            "processes",
            f"{counted(len(pids), 'process')} of run {run} still"
            f" {'run' if len(pids) != 1 else 'runs'} there",
            "no other job of yours on this host",
            f"if it is not needed: dtrain stop {quote(_launched(run))}, where it was launched, or"
            f" run there: kill $({find})",
        )


def _launched(run: str) -> str:
    """The name of a run without the number of its attempt, which hosts add from the second one
    on."""
    return re.sub(r"\.[0-9]+$", "", run)


def _cores(host: HostFacts) -> Iterator[Finding]:
    found = host.fact("machine")
    workers = sum(process.ranks for process in host.part.processes)
    cpus = found.get("cpus", workers)
    if cpus < workers:
        yield host.warning(
            "cpu",
            f"{workers} workers share {counted(cpus, 'core')}",
            "at least one core for each worker in the affinity mask",
            "give the job more cores (Slurm: --cpus-per-task, containers: --cpuset-cpus), or start"
            " fewer workers",
        )
        return
    cores, nodes = found.get("node_cpus", {}), found.get("gpu_nodes", ())
    bound = [gpu for process in host.part.processes for gpu in process.bound_to_gpus]
    wanted = Counter(nodes[gpu] for gpu in bound if gpu < len(nodes))
    for node, gpus in wanted.items():
        usable = cores.get(str(node), gpus)
        if len(cores) > 1 and node is not None and usable < gpus:
            yield host.warning(
                "cpu",
                f"{counted(gpus, 'GPU')} of the job {'are' if gpus != 1 else 'is'} on NUMA"
                f" node {node}, but the affinity mask has {usable or 'no'}"
                f" {plural(usable, 'core')} of that node",
                "one core of the node for each GPU; dtrain does not bind these workers",
                "give the job cores of that node (Slurm: --gpu-bind, containers: --cpuset-cpus),"
                " or set `job.binding: none`",
            )


def _processors(evidence: Evidence) -> Iterator[Finding]:
    governors: dict[str, str] = {}
    nodes: dict[str, str] = {}
    for host in evidence.hosts:
        found = host.fact("machine")
        if found.get("governors"):
            governors[host.name] = "governor " + "+".join(sorted(found["governors"]))
        if found.get("numa_nodes"):
            nodes[host.name] = counted(found["numa_nodes"], "NUMA node")
    for outlier in outliers(governors):
        yield outlier.warning(
            "cpu",
            "the same frequency governor on all hosts: the slowest host limits the job",
            f"sudo cpupower frequency-set -g {outlier.usual.split()[-1].split('+')[0]} there",
        )
    for outlier in outliers(nodes):
        yield outlier.warning(
            "cpu",
            "the same number of NUMA nodes on all hosts",
            "set NPS or sub-NUMA clustering to the same value in the firmware of all hosts",
        )
