"""What the kernel allows the job's processes."""

from __future__ import annotations

from collections.abc import Iterator

from dtrain.checks.evidence import Evidence
from dtrain.checks.finding import Finding, error, warning
from dtrain.checks.sizes import GIB, in_words

FEW_FILES = 1024
FEW_PROCESSES = 1024
OWN_FILES = 200
"""Descriptors that a process needs besides those of its peers."""


def judge(evidence: Evidence) -> Iterator[Finding]:
    for host in evidence.hosts:
        found = host.fact("interpreter").get("limits") or {}
        memlock, nofile, nproc = (found.get(name) for name in ("memlock", "nofile", "nproc"))
        ports = host.fact("infiniband").values()
        rdma = any(port["state"] == "ACTIVE" for port in ports)
        if rdma and memlock is not None and memlock < GIB:
            yield error(
                "memlock",
                [host.name],
                f"processes may lock {in_words(memlock)} of memory",
                "unlimited: RDMA registers what it sends",
                "add `* - memlock unlimited` to /etc/security/limits.conf and"
                " `LimitMEMLOCK=infinity` to sshd's unit, and connect anew",
            )
        # Rank 0's store holds a connection of every rank.
        needed = evidence.plan.world_size + OWN_FILES if host.part.node_rank == 0 else FEW_FILES
        if nofile is not None and nofile < max(needed, FEW_FILES):
            judged = error if nofile < needed and host.part.node_rank == 0 else warning
            yield judged(
                "nofile",
                [host.name],
                f"a process may open {nofile} files",
                f"{max(needed, FEW_FILES)} at least",
                "add `ulimit -n 65536` to job.setup, or `* - nofile 65536` to"
                " /etc/security/limits.conf there",
            )
        if nproc is not None and nproc < FEW_PROCESSES:
            yield warning(
                "nproc",
                [host.name],
                f"the user may have {nproc} processes and threads",
                f"{FEW_PROCESSES} at least",
                "add `* - nproc 65536` to /etc/security/limits.conf there",
            )
