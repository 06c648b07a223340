"""Checks the kernel's limits on the job's processes."""

from __future__ import annotations

from collections.abc import Iterator

from dtrain.checks.evidence import Evidence
from dtrain.checks.finding import Finding
from dtrain.checks.sizes import GIB, in_words

FEW_FILES = 1024
FEW_PROCESSES = 1024
OWN_FILES = 200
"""Descriptors that a process needs in addition to one per peer."""


def judge(evidence: Evidence) -> Iterator[Finding]:
    for host in evidence.hosts:
        found = host.fact("interpreter").get("limits") or {}
        memlock, nofile, nproc = (found.get(name) for name in ("memlock", "nofile", "nproc"))
        ports = host.fact("infiniband").values()
        rdma = any(port["state"] == "ACTIVE" for port in ports)
        if rdma and memlock is not None and memlock < GIB:
            yield host.error(
                "memlock",
                f"processes may lock {in_words(memlock)} of memory",
                "unlimited: RDMA locks its buffers",
                "add `* - memlock unlimited` to /etc/security/limits.conf and"
                " `LimitMEMLOCK=infinity` to sshd's unit, and log in again",
            )
        # The store of rank 0 has a connection to every rank.
        needed = evidence.plan.world_size + OWN_FILES if host.part.node_rank == 0 else 0
        least = max(needed, FEW_FILES)
        if nofile is not None and nofile < least:
            judged = host.error if nofile < needed else host.warning
            yield judged(
                "nofile",
                f"a process may open {nofile} files",
                f"at least {least}",
                "add `ulimit -n 65536` to job.setup, or `* - nofile 65536` to"
                " /etc/security/limits.conf there",
            )
        if nproc is not None and nproc < FEW_PROCESSES:
            yield host.warning(
                "nproc",
                f"the user may have {nproc} processes and threads",
                f"at least {FEW_PROCESSES}",
                "add `* - nproc 65536` to /etc/security/limits.conf there",
            )
