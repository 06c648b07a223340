"""Costs that layouts share are those that each of them would have alone."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from dtrain.parallelism.assumptions import Assumptions
from dtrain.parallelism.cluster.efficiency import of_family
from dtrain.parallelism.cluster.hardware import GpuCluster
from dtrain.parallelism.cluster.hardware_table import hardware
from dtrain.parallelism.cost import activations, data_parallel, memory, states, step_time
from dtrain.parallelism.cost.candidate import Candidate
from dtrain.parallelism.model.models import model
from dtrain.runtime.layout import Layout

CACHES = (
    activations._mean_of_pattern, data_parallel.between_steps, memory.stage_memory,
    states._stage_states, step_time._busy, step_time._layer,
)  # fmt: skip


FIELDS: dict[str, tuple[Any, ...]] = {
    "tensor": (1, 2),
    "pipeline": (1, 2, 4),
    "virtual_pipeline": (1, 2),
    "context": (1, 2),
    "expert": (1, 2),
    "data": (4, 8),
    "sharding": ("none", "optimizer", "gradients", "full", "hybrid"),
    "shard": (2, 4),
    "micro_batch": (1, 2),
    "grad_accumulation": (4, 8),
    "recompute": ("none", "selective", "full"),
    "sequence_parallel": (False, True),
    "offload": (False, True),
    "reduce": ("fp32", "bf16"),
    "compile": (False, True),
    "backend": ("runtime", "megatron", "torchtitan"),
}


def layouts(count: int) -> list[Layout]:
    """``count`` layouts, and all that differ from one of them in one field."""
    draw = Random(1).choice
    found = []
    for _ in range(count):
        values = {name: draw(choices) for name, choices in FIELDS.items()}
        near = [values | {name: one} for name, choices in FIELDS.items() for one in choices]
        found += [each | ({} if each["sharding"] == "hybrid" else {"shard": None}) for each in near]
    return [Layout(**each) for each in found]


@pytest.mark.parametrize("name", ["llama-3-8b", "mixtral-8x7b", "nemotron-3-nano"])
def test_costs_do_not_depend_on_other_layouts(name: str) -> None:
    gpu = hardware().gpu("h100")
    cluster, efficiency = GpuCluster(gpu, 64, 8, 50.0), of_family(gpu.family)
    shape, assumed = model(name), Assumptions()

    def costs(layout: Layout) -> tuple[object, ...]:
        one = Candidate(shape, layout, cluster, efficiency, assumed)
        return one.memory, one.least_kept, one.time, one.least_time

    def alone(layout: Layout) -> tuple[object, ...]:
        for cache in CACHES:
            cache.cache_clear()
        return costs(layout)

    every = layouts(20)
    together = [costs(layout) for layout in every]
    assert together == [alone(layout) for layout in every]


@pytest.mark.parametrize("name", ["llama-3-8b", "mixtral-8x7b", "nemotron-3-nano"])
def test_states_depend_only_on_the_fields_of_their_key(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, assumed = model(name), Assumptions()
    for layout in layouts(20):
        found = states.stage_states(shape, layout, assumed, 0)
        with monkeypatch.context() as patch:
            patch.setattr(states, "Layout", lambda **_: layout)  # noqa: B023  called at once
            states._stage_states.cache_clear()
            assert states.stage_states(shape, layout, assumed, 0) == found
        states._stage_states.cache_clear()
