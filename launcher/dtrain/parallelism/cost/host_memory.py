"""The hosts' memory of offloaded states."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from dtrain.parallelism.assumptions import Assumptions
from dtrain.parallelism.cluster.hardware import GIB
from dtrain.parallelism.cost.layer import BYTES
from dtrain.parallelism.cost.stages import (
    adapters_of_stage,
    extreme_stages,
    parameters_of_stage,
    stage_layers,
)
from dtrain.parallelism.cost.states import STATE_VALUES, with_state_values
from dtrain.parallelism.model.shape import Shape
from dtrain.runtime.layout import Layout


class HostMemory(NamedTuple):
    """GiB in the memory of a host."""

    pinned: float
    pageable: float

    @property
    def total(self) -> float:
        return self.pinned + self.pageable


def host_memory(shape: Shape, layout: Layout, assumed: Assumptions) -> HostMemory:
    """Return the memory for the GPU with the most states, of a layout that offloads.

    FSDP2's ``CPUOffloadPolicy`` pins parameters (``init_sharded_param``) and gradients, because a
    copy to the host that does not block is pinned (``foreach_reduce``). Megatron-Core pins copies
    of both in 32 bits (``hybrid_optimizer.py``). Adam's moments are pageable. PyTorch's allocator
    rounds each pinned tensor up to a power of two (``CachingHostAllocator.h``, pytorch issue
    150517).
    """
    return _host_memory(shape, STATE_VALUES(layout), assumed)


@lru_cache(maxsize=1 << 14)
def _host_memory(shape: Shape, fields: tuple[Any, ...], assumed: Assumptions) -> HostMemory:
    layout = with_state_values(fields)
    each = 2 if assumed.narrow_states else 4
    layers = stage_layers(shape, layout, assumed.habits.fullest)
    trained, frozen = max(
        _share(shape, layout, layers[stage], stage)
        for stage in extreme_stages(shape, layout, assumed)
    )
    fixed = 0.0
    shards, expert = layout.shards, layout.expert
    if assumed.habits.offloads == "all":
        fixed = (shape.frozen_matrix_bytes or BYTES[assumed.precision]) * frozen
    else:
        # Megatron-LM's ranks share one flat buffer, so most matrices are whole.
        shards = expert = 1
    rounding = _rounding(shape, layout.tensor, shards, expert)
    pinned = (2 * each * trained + fixed) * rounding
    return HostMemory(pinned / GIB, 2 * each * trained / GIB)


def _share(shape: Shape, layout: Layout, layers: int, stage: int) -> tuple[float, float]:
    """Return the trained and the frozen parameters of one rank's share."""
    whole = _sharded(layout, *parameters_of_stage(shape, layout, layers, stage))
    if shape.lora is None:
        return whole, 0.0
    return _sharded(layout, *adapters_of_stage(shape, layout, layers)), whole


def _sharded(layout: Layout, dense: float, experts: float) -> float:
    return dense / layout.shards + experts / layout.expert_shards


@lru_cache(maxsize=4096)
def _rounding(shape: Shape, tensor: int, shards: int, expert: int) -> float:
    """Return the factor by which powers of two exceed the 32-bit shares of the matrices."""
    exact = rounded = 0.0
    for count, elements, of_experts in _matrices(shape):
        ranks = max(1, shards // expert) if of_experts else shards
        size = 4 * elements / tensor / ranks
        exact += count * size
        rounded += count * 2.0 ** math.ceil(math.log2(size)) if size else 0.0
    return rounded / exact


def _matrices(shape: Shape) -> Iterator[tuple[int, int, bool]]:
    """Yield the number of a model's matrices of one size, their elements, and whether they are
    experts'; without those of latent attention and of other parts."""
    yield 1 if shape.tied else 2, shape.head_parameters, False
    for kind, count in shape.kinds or ((shape, 1),):
        width, layers, moe = kind.hidden, count * kind.layers, count * kind.moe_layers
        if not kind.kv_rank:
            yield 2 * layers, width * kind.heads * kind.head_size, False
            yield 2 * layers, width * kind.kv_heads * kind.head_size, False
        yield moe * kind.experts * kind.matrices, kind.expert_width * kind.ffn_hidden, True
        yield moe * kind.shared_experts * kind.matrices, width * kind.ffn_hidden, True
        dense = kind.dense_ffn_hidden or kind.ffn_hidden
        yield (layers - moe) * kind.matrices, width * dense, False
