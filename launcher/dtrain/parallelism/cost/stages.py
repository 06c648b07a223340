"""The layers of each pipeline stage, and their parameters."""

from __future__ import annotations

from functools import lru_cache

from dtrain.parallelism.backends import backend_of
from dtrain.parallelism.model.shape import Shape
from dtrain.runtime.layout import Layout


def stage_layers(shape: Shape, layout: Layout) -> tuple[int, ...]:
    """Return the number of layers of each pipeline stage, at least one each, first stage first.

    Stages are equal if their number divides the layers, as in frameworks. Otherwise the last
    stage, which also has the output layer, gets fewer, and so does the first, which has the
    embedding: the slowest stage determines the speed. `dtrain.runtime` gives a stage at most one
    more layer than another.
    """
    stages = layout.pipeline
    if backend_of(layout).runtime_memory:
        each, left = divmod(shape.layers, stages)
        middle_first = sorted(range(stages), key=lambda stage: (stage in (0, stages - 1), stage))
        favoured = set(middle_first[:left])
        return tuple(each + (stage in favoured) for stage in range(stages))
    ends = shape.embedding_parameters + (0 if shape.tied else shape.head_parameters)
    layer = (shape.active_parameters - ends) / shape.layers
    return _spread(shape.layers, stages, shape.head_parameters / layer)


@lru_cache(maxsize=4096)
def _spread(layers: int, stages: int, head: float) -> tuple[int, ...]:
    """``head`` is the output layer's work, in units of a layer's work."""
    if layers % stages == 0:
        return (layers // stages,) * stages
    counts = [1] * stages
    weights = [0.0] * stages
    weights[-1] = head
    # The embedding takes memory but little time: it decides between otherwise equal stages.
    weights[0] += 0.1
    for _ in range(layers - stages):
        lightest = min(range(stages), key=lambda stage: counts[stage] + weights[stage])
        counts[lightest] += 1
    return tuple(counts)


def parameters_of_stage(
    shape: Shape, layout: Layout, layers: int, stage: int
) -> tuple[float, float]:
    """Parameters on one GPU of a stage of ``layers``: all but the experts', and the experts'."""
    moe = layers * shape.moe_layers / shape.layers
    every = shape.experts * shape.expert_parameters
    dense = moe * (shape.layer_parameters(moe=True) - every)
    dense += (layers - moe) * shape.layer_parameters(moe=False)
    if stage == 0:
        dense += shape.embedding_parameters
    if stage == layout.pipeline - 1 and not (shape.tied and stage == 0):
        dense += shape.head_parameters
    return dense / layout.tensor, moe * every / layout.expert / layout.tensor
