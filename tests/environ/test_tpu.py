"""TPU slices: the arrangement of hosts, and TensorFlow's own resolver."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from dtrain.environ import tpu
from dtrain.launchplan.build import build
from dtrain.spec.load import parse

SLICE = """\
cluster: {hosts: [10.0.0.1, 10.0.0.2, 10.0.0.3, 10.0.0.4], gpus: 0, tpu: 2x2x4}
job: {framework: tensorflow, strategy: tpu, script: t.py}
"""

RESOLVE = """\
import json
import tensorflow as tf
resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu="")
print(json.dumps([resolver.cluster_spec().as_dict(), resolver.master()]))
"""


@pytest.mark.parametrize(
    ("topology", "hosts", "processes", "chips"),
    [
        # Google's documented example: a v4-256 slice (4x4x8, 32 hosts) has HOST_BOUNDS 2,2,8.
        ("4x4x8", 32, (2, 2, 8), (2, 2, 1)),
        ("2x2x4", 4, (1, 1, 4), (2, 2, 1)),
        ("4x4", 4, (2, 2, 1), (2, 2, 1)),
        ("2x4", 2, (1, 2, 1), (2, 2, 1)),
        ("2x4", 1, (1, 1, 1), (2, 4, 1)),
        ("1x1", 1, (1, 1, 1), (1, 1, 1)),
    ],
)
def test_bounds(
    topology: str, hosts: int, processes: tuple[int, ...], chips: tuple[int, ...]
) -> None:
    assert tpu.bounds(topology, hosts) == (processes, chips)


@pytest.mark.parametrize(("topology", "hosts"), [("4x4", 3), ("4x4", 1), ("1x8", 2), ("2x2", 8)])
def test_topologies_that_hosts_cannot_share(topology: str, hosts: int) -> None:
    with pytest.raises(ValueError, match=f"a TPU slice of {topology} has"):
        tpu.bounds(topology, hosts)


@pytest.mark.parametrize("hosts", range(1, 65))
def test_the_default_topology_is_valid(hosts: int) -> None:
    processes, chips = tpu.bounds(tpu.usual(hosts), hosts)
    assert processes[0] * processes[1] * processes[2] == hosts
    assert chips == (2, 2, 1)


def test_only_the_first_host_runs_the_script() -> None:
    first, *others = build(parse(SLICE, "c.yaml")).hosts
    assert [len(host.processes) for host in (first, *others)] == [1, 0, 0, 0]
    environment = {**first.environment, **first.processes[0].environment}
    assert environment["TPU_LOAD_LIBRARY"] == "0", "it would take the chips from the service"
    assert "TF_CONFIG" not in environment


@pytest.mark.tensorflow
def test_tensorflow_resolves_the_slice() -> None:
    host = build(parse(SLICE, "c.yaml")).hosts[0]
    done = subprocess.run(
        [sys.executable, "-c", RESOLVE],
        env={**os.environ, **host.environment, **host.processes[0].environment},
        check=True,
        capture_output=True,
        text=True,
    )
    workers, master = json.loads(done.stdout.splitlines()[-1])
    assert workers == {"worker": [f"10.0.0.{n}:8470" for n in (1, 2, 3, 4)]}
    assert master == "grpc://10.0.0.1:8470"
