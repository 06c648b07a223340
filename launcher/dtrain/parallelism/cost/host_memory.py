"""The hosts' memory of offloaded states."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from dtrain.parallelism.assumptions import Assumptions
from dtrain.parallelism.backends import backend_of
from dtrain.parallelism.cost.memory import memory
from dtrain.parallelism.model.shape import Shape
from dtrain.runtime.layout import Layout


class HostMemory(NamedTuple):
    """GiB of the states of the fullest GPU in the memory of its host."""

    pinned: float
    pageable: float

    @property
    def total(self) -> float:
        return self.pinned + self.pageable


def host_memory(shape: Shape, layout: Layout, assumed: Assumptions) -> HostMemory:
    """Return the memory of a layout that offloads.

    FSDP2's ``CPUOffloadPolicy`` pins parameters (``init_sharded_param``) and gradients, because a
    copy to the host that does not block is pinned (``foreach_reduce``); Megatron-Core pins copies
    of both in 32 bits (``hybrid_optimizer.py``). Adam's moments are pageable. A gradient is as
    large as a moment. PyTorch's allocator rounds each pinned tensor up to a power of two
    (``CachingHostAllocator.h``, pytorch issue 150517).
    """
    backend = backend_of(layout)
    kept = memory(shape, replace(layout, offload=False), assumed)
    moments, parameters = kept.optimizer, kept.parameters
    if not (backend.runtime_memory or layout.shards_parameters or assumed.narrow_states):
        # The optimizer has a copy of the parameters beside the moments.
        moments *= 2 / 3
        parameters = moments / 2
    elif not backend.offloads_parameters:
        parameters = moments / 2
    return HostMemory((parameters + moments / 2) * _rounding(shape, layout), moments)


def _rounding(shape: Shape, layout: Layout) -> float:
    """Return the factor by which powers of two exceed the matrices' 32-bit shares. Megatron-LM's
    ranks share one buffer, so that most matrices are whole."""
    by_matrix = backend_of(layout).offloads_parameters
    shares = layout.shards if by_matrix else 1
    exact = rounded = 0.0
    for count, elements, of_experts in _matrices(shape):
        ranks = max(1, shares // layout.expert) if of_experts else shares
        size = 4 * elements / layout.tensor / ranks
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
        experts = (kind.experts + kind.shared_experts) * kind.matrices
        yield moe * experts, width * kind.ffn_hidden, True
        dense = kind.dense_ffn_hidden or kind.ffn_hidden
        yield (layers - moe) * kind.matrices, width * dense, False
