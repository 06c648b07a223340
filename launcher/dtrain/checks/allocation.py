"""Checks what an engine gives the job on the machines that it chooses: GPUs, and the folder that
they share with the login node."""

from __future__ import annotations

from collections.abc import Iterator

from dtrain.checks.evidence import Evidence, HostFacts
from dtrain.checks.finding import Finding
from dtrain.wording import counted


def judge(evidence: Evidence) -> Iterator[Finding]:
    for host in evidence.hosts:
        yield from _shared(host)
        if host.fact("granted"):
            yield from _granted(host)


def _shared(host: HostFacts) -> Iterator[Finding]:
    found = host.fact("shared")
    if not found:
        return
    where = host.short(found["path"])
    expected = "the login node and all machines share the folder, and the job can write there"
    if found["missing"]:
        yield host.error(
            "cluster.run_dir",
            f"a file that the login node has written to {where} is not there: {found['missing']}",
            expected,
            "set cluster.run_dir to a folder that all machines share",
        )
    elif found.get("not_writable"):
        yield host.error(
            "cluster.run_dir",
            f"cannot write to {where}: {found['not_writable']}",
            expected,
            "set cluster.run_dir to a shared folder of yours",
        )


def _granted(host: HostFacts) -> Iterator[Finding]:
    found, wanted = host.fact("granted"), len(host.part.host.gpus)
    given = len(found["devices"])
    expected = f"the {counted(wanted, 'GPU')} of cluster.gpus"
    if wanted and found["count"] < wanted:
        yield host.error(
            "gpu",
            f"the job gets {counted(found['count'], 'GPU')} there",
            expected,
            "set cluster.gpus to the number of GPUs of one machine",
        )
    elif wanted and not given:
        yield host.warning(
            "gpu",
            "CUDA_VISIBLE_DEVICES is not set, so the job may use GPUs of other jobs",
            "the cluster's configuration names the device files of its GPUs",
            "ask the administrator to add File= to gres.conf, or use whole machines:"
            " cluster.slurm.options: ['--exclusive']",
        )
    elif given < wanted:
        yield host.error(
            "gpu",
            f"CUDA_VISIBLE_DEVICES names {counted(given, 'GPU')}",
            expected,
            "look for a login script or a plugin that changes it",
        )
