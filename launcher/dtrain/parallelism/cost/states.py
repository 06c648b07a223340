"""The memory of a model's states on one GPU: weights, gradients, and what the optimizer keeps."""

from __future__ import annotations

from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple

from dtrain.parallelism.assumptions import Assumptions
from dtrain.parallelism.backends import reduces_each_micro_batch
from dtrain.parallelism.cost.layer import BYTES
from dtrain.parallelism.cost.stages import (
    StageRank,
    adapters_of_stage,
    layers_of_stage,
    parameters_of_stage,
)
from dtrain.parallelism.model.shape import Shape
from dtrain.records import dataclass
from dtrain.runtime.layout import Layout


class StageStates(NamedTuple):
    """Bytes of the states on one GPU of a stage."""

    parameters: float
    gradients: float
    optimizer: float
    step: float
    """Of gradients and moments that the step casts to 32 bits."""


_FIELDS = (
    "backend", "tensor", "pipeline", "virtual_pipeline", "context", "expert", "data", "sharding",
    "shard", "offload",
)  # fmt: skip
"""The fields of a layout that the states depend on."""
STATE_VALUES = attrgetter(*_FIELDS)


def with_state_values(values: tuple[Any, ...]) -> Layout:
    """Return a layout with these `STATE_VALUES`."""
    return Layout(**dict(zip(_FIELDS, values, strict=True)))


def stage_states(shape: Shape, layout: Layout, assumed: Assumptions, stage: int) -> StageStates:
    """Return the states of a stage, computed once for all ways to compute a step."""
    return _stage_states(shape, STATE_VALUES(layout), assumed, stage)


@lru_cache(maxsize=1 << 14)
def _stage_states(
    shape: Shape, fields: tuple[Any, ...], assumed: Assumptions, stage: int
) -> StageStates:
    layout = with_state_values(fields)
    rank = StageRank(shape, layout, assumed, stage, layers_of_stage(shape, layout, assumed, stage))
    states = _States.of(layout, assumed)
    dense, experts = parameters_of_stage(shape, layout, rank.layers, rank.stage)
    shards, expert_shards = layout.shards, layout.expert_shards
    fixed = 0.0
    if shape.lora is not None:
        fixed = _frozen(rank, dense) / states.spread(shards)
        fixed += _matrix_bytes(shape, assumed) * experts / states.spread(expert_shards)
        dense, experts = adapters_of_stage(shape, layout, rank.layers)
    elif not assumed.by_torch(layout):
        fixed = assumed.quantized * (dense - _ends(rank) + experts)
    parameters = fixed + states.parameters(dense, shards)
    parameters += states.parameters(experts, expert_shards)
    if layout.offload and assumed.habits.offloads == "all" and layout.shards_parameters:
        parameters = 0.0
    return StageStates(
        parameters,
        states.gradients(dense, shards) + states.gradients(experts, expert_shards),
        states.optimizer(dense, shards) + states.optimizer(experts, expert_shards),
        states.step(dense, shards) + states.step(experts, expert_shards),
    )


def _matrix_bytes(shape: Shape, assumed: Assumptions) -> float:
    """Bytes of a frozen parameter of a layer's matrices."""
    return shape.frozen_matrix_bytes or _rest_bytes(assumed)


def _rest_bytes(assumed: Assumptions) -> float:
    """Bytes of a frozen parameter that is not in 4 bits."""
    return 4 if assumed.habits.wide_rest else BYTES[assumed.precision]


def _frozen(rank: StageRank, count: float) -> float:
    """Bytes of ``count`` frozen parameters, all but the experts'."""
    whole = _ends(rank)
    matrices = _matrix_bytes(rank.shape, rank.assumed) * (count - whole)
    return _rest_bytes(rank.assumed) * whole + matrices


def _ends(rank: StageRank) -> float:
    """Parameters of the embedding and the output layer."""
    return rank.embedding + (0.0 if rank.shape.tied and rank.first else rank.head)


@dataclass(frozen=True, slots=True)
class _States:
    """Bytes of each parameter's states, and the number of data ranks that shard each state.

    Mixed-precision Adam keeps parameter and gradient in 16 bits (the gradient in 32 if it is
    accumulated so) and a copy and two moments in 32: 18 bytes in total; 16 with gradients of 16
    bits, and with fp16 20 while the step has them in 32 (Megatron-LM, ``dist_optimizer.md``); 16
    under full sharding, whose parameters are the 32-bit copy (ZeRO, arXiv 1910.02054). 8 if all of
    them have 16 bits.
    """

    layout: Layout
    parameter: float
    gradient: float
    moments: float
    copies: float
    cast: float = 0.0
    """Of gradients and moments that the step casts to 32 bits when the activations are gone.
    `copies` has those of flat tensors, which do not fit where activations were."""

    @staticmethod
    def of(layout: Layout, assumed: Assumptions) -> _States:
        # `sharded_memory` has the phase of the step.
        copies = 0 if assumed.by_torch(layout) else assumed.step_copies
        habits = assumed.habits
        if assumed.narrow_states:
            return _States(layout, 2, 2, min(4, 2 * habits.moment_bytes), copies)
        if layout.shards_parameters or assumed.precision in ("tf32", "fp32"):
            return _States(layout, 4, 4, 2 * habits.moment_bytes, copies)
        moments = 2 * habits.moment_bytes + habits.master_bytes
        cast = 8 if 0 < habits.moment_bytes < 4 else 0
        if not assumed.fp32_gradients:
            # NeMo's Adam reads bf16 gradients as they are.
            cast += 4 if assumed.precision == "fp16" and not copies else 0
            return _States(layout, 2, 2, moments, copies, cast)
        return _States(layout, 2, 6 if habits.both_gradients else 4, moments, copies, cast)

    def spread(self, shards: int) -> int:
        """How many ranks divide the parameters of which ``shards`` ranks divide some states."""
        return shards if self.layout.shards_parameters else 1

    def parameters(self, count: float, shards: int) -> float:
        return self.parameter * count / self.spread(shards)

    def gradients(self, count: float, shards: int) -> float:
        return self.gradient * count / (shards if reduces_each_micro_batch(self.layout) else 1)

    def optimizer(self, count: float, shards: int) -> float:
        """Bytes of the moments and the 32-bit copy, and of what the step copies."""
        if self.layout.offload:
            return 0.0
        return (self.moments + self.copies) * count / shards

    def step(self, count: float, shards: int) -> float:
        """Bytes of gradients and moments that the step casts to 32 bits."""
        return 0.0 if self.layout.offload else self.cast * count / shards
