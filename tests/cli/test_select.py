"""The values of options that select the output of workers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dtrain.diagnostics import UsageError
from dtrain.runs.folder import RunFolder
from dtrain.runs.record import Record
from dtrain.runs.request import Request
from dtrain.spec.load import parse
from dtrain_cli.commands.select import filters, filters_of_run
from dtrain_cli.views import Filters

FILE = "cluster: {{{where}, gpus: 1}}\njob: {{framework: torch, script: train.py}}\n"


@pytest.mark.parametrize(
    ("where", "host", "known"),
    [
        ("hosts: [a, b], spares: [c]", "c", True),
        ("hosts: [a, b], spares: [c]", "d", False),
        # Slurm chooses the machines, and may choose others after a restart.
        ("slurm: {partition: gpu}, nodes: 2", "node17", True),
        ("kubernetes: {image: train}, nodes: 2", "node1", True),
        ("kubernetes: {image: train}, nodes: 2", "node2", False),
    ],
)
def test_hosts_of_the_job(where: str, host: str, *, known: bool) -> None:
    spec = parse(FILE.format(where=where), "c.yaml")
    if known:
        assert filters(None, host, spec).hosts == {host}
        return
    with pytest.raises(UsageError, match=f"no host {host} in this cluster"):
        filters(None, host, spec)


def test_hosts_that_slurm_gave_a_run(tmp_path: Path) -> None:
    text = FILE.format(where="slurm: {partition: gpu}, nodes: 2")
    folder = RunFolder(tmp_path)
    record = Record("run-1", Request("c.yaml", "/", text), 29500, "python3", 0.0)

    def chosen(host: str, *allocated: str) -> frozenset[str] | None:
        replace(record, allocated=allocated).save(tmp_path)
        return filters_of_run(None, host, folder).hosts

    # Until an attempt has its machines, they may be any, also if an earlier attempt had others.
    (folder.logs / "node1").mkdir(parents=True)
    assert chosen("node17") == {"node17"}
    assert chosen("node4", "node3", "node4") == {"node4"}
    assert chosen("node1", "node3", "node4") == {"node1"}
    with pytest.raises(UsageError, match="no host node17") as caught:
        chosen("node17", "node3", "node4")
    assert "node[3-4,1]" in caught.value.hint


@pytest.mark.parametrize("backend", ["direct", "static", "c10d"])
def test_ranks_and_hosts_without_a_common_worker(backend: str) -> None:
    job = f"job: {{framework: torch, script: t.py, rendezvous: {{backend: {backend}}}}}\n"

    def chosen(ranks: str, host: str, spares: str = "") -> Filters:
        spec = parse(f"cluster: {{hosts: [a, b], gpus: 2{spares}}}\n{job}", "c.yaml")
        return filters(ranks, host, spec)

    assert chosen("1-2", "b").ranks == {1, 2}
    # A spare may get any rank.
    assert chosen("2", "a", ", spares: [c]").hosts == {"a"}
    if backend == "c10d":  # torchrun numbers the hosts
        assert chosen("2,3", "a").hosts == {"a"}
        return
    with pytest.raises(UsageError, match="--rank 2,3 and --host a have no worker") as caught:
        chosen("2,3", "a")
    assert caught.value.hint == "these ranks are on b"
