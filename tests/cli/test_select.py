"""The values of options that select the output of workers."""

from __future__ import annotations

import pytest

from dtrain.diagnostics import UsageError
from dtrain.spec.load import parse
from dtrain.spec.model import ClusterFile
from dtrain_cli.commands.select import filters, hosts

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
        assert hosts(host, spec) == {host}
        return
    with pytest.raises(UsageError, match=f"no host {host} in this cluster"):
        hosts(host, spec)


def test_hosts_that_slurm_gave_a_run() -> None:
    spec = parse(FILE.format(where="slurm: {partition: gpu}, nodes: 2"), "c.yaml")
    machines = {"node4", "node3"}
    assert hosts("node4", spec, machines) == {"node4"}
    with pytest.raises(UsageError, match="no host node17") as caught:
        hosts("node17", spec, machines)
    assert "node[3-4]" in caught.value.hint


@pytest.mark.parametrize("backend", ["direct", "static"])
def test_ranks_and_hosts_without_a_common_worker(backend: str) -> None:
    where = "hosts: [a, b]"
    job = f"job: {{framework: torch, script: t.py, rendezvous: {{backend: {backend}}}}}\n"

    def spec(where: str) -> ClusterFile:
        return parse(f"cluster: {{{where}, gpus: 2}}\n{job}", "c.yaml")

    assert filters("1-2", "b", spec(where)).ranks == {1, 2}
    with pytest.raises(UsageError, match="--rank 2,3 and --host a have no worker") as caught:
        filters("2,3", "a", spec(where))
    assert caught.value.hint == "these ranks are on b"
    # A spare may get any rank.
    assert filters("2", "a", spec(f"{where}, spares: [c]")).hosts == {"a"}
