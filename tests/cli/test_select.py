"""The values of options that select the output of workers."""

from __future__ import annotations

import pytest

from dtrain.diagnostics import UsageError
from dtrain.spec.load import parse
from dtrain_cli.commands.select import hosts

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
