"""A job that continues on fewer hosts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dtrain.launchplan.build import build
from dtrain.runtime.layout_rules import MisfitError
from dtrain.spec.elastic import differences, without
from dtrain.spec.load import parse
from dtrain.spec.model import ClusterFile


def load(hosts: str = "n[1-4]", gpus: int = 2, min_hosts: int = 1, **job: Any) -> ClusterFile:
    document = {
        "cluster": {"hosts": hosts, "gpus": gpus},
        "job": {
            "framework": "torch",
            "script": "train.py",
            "restart": {"max": 3},
            "elastic": {"min_hosts": min_hosts},
            **job,
        },
    }
    return parse(json.dumps(document), "cluster.yaml")


def names(spec: ClusterFile) -> list[str]:
    return [host.name for host in spec.cluster.hosts]


def sizes(spec: ClusterFile, *keys: str) -> tuple[object, ...]:
    assert spec.job.layout is not None
    return tuple(getattr(spec.job.layout, key) for key in keys)


def batch(spec: ClusterFile) -> int | None:
    return spec.job.training.global_batch if spec.job.training is not None else None


def test_data_shrinks_and_the_batch_stays() -> None:
    spec = load(strategy="fsdp", training={"global_batch": 24, "precision": "bf16"})
    then = without(spec, {"n2"})
    assert names(then) == ["n1", "n3", "n4"]
    assert sizes(then, "data", "sharding", "global_batch") == (6, "full", 24)
    assert then.job.training == spec.job.training
    assert names(without(then, {"n1"})) == ["n3", "n4"]


@pytest.mark.parametrize(
    ("micro_batch", "accumulation", "then"),
    [
        (2, 3, (2, 4)),  # the same size, but more of them
        (6, 1, (4, 2)),  # smaller if necessary, never larger: memory may be full
        (3, 2, (2, 4)),
    ],
)
def test_micro_batches_follow_from_the_batch(
    micro_batch: int, accumulation: int, then: tuple[int, int]
) -> None:
    given = {"micro_batch": micro_batch, "grad_accumulation": accumulation}
    spec = without(load(strategy="ddp", layout=given), {"n1"})
    assert sizes(spec, "data", "micro_batch", "grad_accumulation") == (6, *then)
    assert batch(spec) == 48


@pytest.mark.parametrize(("before", "nearest"), [(512, 510), (8, 6), (16, 18)])
def test_an_indivisible_batch_changes_as_little_as_possible(before: int, nearest: int) -> None:
    spec = load(strategy="ddp", layout={"micro_batch": 1}, training={"global_batch": before})
    then = without(spec, {"n1"})
    assert batch(then) == nearest
    assert sizes(then, "global_batch") == (nearest,)
    assert [*differences(spec, then)] == [
        "data 6 instead of 8",
        f"global batch {nearest} instead of {before}",
    ]


def test_without_a_batch_in_the_file_the_script_chooses() -> None:
    assert batch(without(load(strategy="ddp"), {"n1"})) is None


def test_an_interleaved_pipeline_keeps_complete_rounds() -> None:
    given = {"pipeline": 2, "virtual_pipeline": 2, "data": 4, "micro_batch": 3}
    spec = load(layout=given, training={"global_batch": 24})
    then = without(spec, {"n1"})
    assert sizes(then, "data", "micro_batch", "grad_accumulation") == (3, 2, 4)


@pytest.mark.parametrize(
    ("job", "used", "keys", "expected"),
    [
        (
            {"layout": {"tensor": 2, "pipeline": 2, "data": 2, "sharding": "optimizer"}},
            ["n1", "n3"],
            ("tensor", "pipeline", "data", "sharding"),
            (2, 2, 1, "none"),
        ),
        ({"strategy": "tensor"}, ["n1", "n3", "n4"], ("tensor", "data"), (2, 3)),
        ({"strategy": "hsdp"}, ["n1", "n3", "n4"], ("data", "shard"), (6, 2)),
        (
            {"strategy": "hsdp", "layout": {"shard": 4}},
            ["n1", "n3"],
            ("data", "sharding", "shard"),
            (4, "hybrid", 4),
        ),
        (
            {"strategy": "none", "layout": {"context": 2, "data": 4, "expert": 4}},
            ["n1", "n3"],
            ("context", "data", "expert"),
            (2, 2, 4),
        ),
        (
            {
                "strategy": "none",
                "layout": {"context": 2, "data": 4, "sharding": "hybrid", "shard": 4},
            },
            ["n1", "n3"],
            ("context", "data", "shard"),
            (2, 2, 4),
        ),
    ],
)
def test_the_model_split_stays(
    job: dict[str, Any], used: list[str], keys: tuple[str, ...], expected: tuple[object, ...]
) -> None:
    then = without(load(**job), {"n2"})
    assert names(then) == used
    assert sizes(then, *keys) == expected
    # The result is a normal launch.
    assert build(then).world_size == sizes(then, "world_size")[0]


def test_fewer_hosts_than_min_hosts_are_not_used() -> None:
    spec = load(layout={"tensor": 2, "data": 4}, min_hosts=2)
    assert names(without(spec, {"n2", "n3"})) == ["n1", "n4"]
    wide = load("n[1-6]", layout={"tensor": 4, "data": 3}, min_hosts=4)
    assert names(without(wide, {"n6"})) == ["n1", "n2", "n3", "n4"]
    with pytest.raises(MisfitError) as caught:
        without(wide, {"n4", "n5", "n6"})
    assert caught.value.message == (
        "the layout (tensor 4) needs a multiple of 4 workers; the 3 remaining hosts have 6, and "
        "job.elastic.min_hosts is 4"
    )


def test_without_a_layout_the_script_gets_the_remaining_hosts() -> None:
    then = without(load(), {"n2"})
    assert then.job == load().job
    assert build(then).world_size == 6


def test_fewer_tensorflow_workers() -> None:
    spec = load(
        framework="tensorflow",
        strategy="multi_worker_mirrored",
        training={"global_batch": 64},
        gpus=1,
    )
    then = without(spec, {"n3"})
    cluster = json.loads(build(then).hosts[2].processes[0].environment["TF_CONFIG"])
    assert [address.split(":")[0] for address in cluster["cluster"]["worker"]] == ["n1", "n2", "n4"]
    assert cluster["task"] == {"type": "worker", "index": 2}
    # Replicas divide a batch equally.
    assert batch(then) == 63
    assert [*differences(spec, then)] == ["global batch 63 instead of 64"]


@pytest.mark.parametrize(
    ("roles", "lost", "left"),
    [
        ({"chief": 1, "worker": 4, "ps": 2}, {"n2"}, {"chief": 1, "worker": 3, "ps": 2}),
        ({"chief": 1, "worker": 4, "ps": 2}, {"n4", "n3"}, {"chief": 1, "worker": 2, "ps": 2}),
        ({"chief": 1, "worker": 1, "ps": 1}, {"n1"}, {"chief": 1, "worker": 1, "ps": 1}),
        ({"chief": 1, "worker": 3}, {"n1"}, {"chief": 1, "worker": 2}),
        ({"chief": 1, "worker": 1}, {"n2"}, {"chief": 1}),
        ({"worker": 4, "evaluator": 1}, {"n4"}, {"worker": 3, "evaluator": 1}),
    ],
)
def test_workers_end_with_their_host_and_other_roles_move(
    roles: dict[str, int], lost: set[str], left: dict[str, int]
) -> None:
    spec = load(framework="tensorflow", roles=roles, gpus=0)
    then = without(spec, lost)
    assert then.job.roles == left
    plan = build(then)
    assert {host.host.name for host in plan.hosts}.isdisjoint(lost)
    placed = [process.role for host in plan.hosts for process in host.processes]
    assert {role: placed.count(role) for role in placed} == left


def test_workers_keep_their_number_of_gpus() -> None:
    spec = load(
        "n[1-3]",
        gpus=4,
        framework="tensorflow",
        strategy="multi_worker_mirrored",
        roles={"worker": 6},
    )
    then = without(spec, {"n1"})
    assert then.job.roles == {"worker": 4}
    visible = [
        process.environment["CUDA_VISIBLE_DEVICES"]
        for host in build(then).hosts
        for process in host.processes
    ]
    assert visible == ["0,1", "2,3"] * 2


def test_a_host_counts_with_its_own_workers() -> None:
    spec = parse(
        """
cluster: {hosts: [a, b, c], gpus: 4, overrides: {c: {gpus: 8}}}
job:
  framework: torch
  script: train.py
  strategy: 3d
  layout: {tensor: 8, data: 2}
  restart: {max: 1}
  elastic: {min_hosts: 1}
""",
        "cluster.yaml",
    )
    assert names(without(spec, {"c"})) == ["a", "b"]
    with pytest.raises(MisfitError):
        without(spec, {"a"})
