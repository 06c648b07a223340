"""Costs that layouts share are those that each of them would have alone."""

from __future__ import annotations

from random import Random

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


def layouts(count: int) -> list[Layout]:
    """Layouts that have few values of each field, so that many have most fields in common."""
    draw = Random(1).choice
    return [
        Layout(
            tensor=tensor,
            pipeline=draw([1, 2, 4]),
            virtual_pipeline=draw([1, 2]),
            context=draw([1, 2]),
            expert=draw([1, 2]),
            data=draw([4, 8]),
            sharding=sharding,
            shard=draw([2, 4]) if sharding == "hybrid" else None,
            micro_batch=draw([1, 2]),
            grad_accumulation=draw([4, 8]),
            recompute=draw(["none", "selective", "full"]),
            sequence_parallel=tensor > 1 and draw([False, True]),
            offload=draw([False, True]),
            reduce=draw(["fp32", "bf16"]),
            compile=draw([False, True]),
            backend=draw(["runtime", "megatron", "torchtitan"]),
        )
        for _ in range(count)
        for tensor in (draw([1, 2]),)
        for sharding in (draw(["none", "optimizer", "gradients", "full", "hybrid"]),)
    ]


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

    every = layouts(400)
    together = [costs(layout) for layout in every]
    assert together == [alone(layout) for layout in every]
