"""What each stage of a pipeline holds: its layers, and their parameters."""

from __future__ import annotations

from functools import lru_cache

from dtrain.parallelism.layout import Layout
from dtrain.parallelism.shape import Shape


@lru_cache(maxsize=4096)
def stage_layers(layers: int, stages: int, head: float) -> tuple[int, ...]:
    """Layers on each stage, first stage first; they sum to ``layers``.

    Even where ``stages`` divides ``layers``, as frameworks do it. Else the last stage, which also
    has the output layer (worth ``head`` layers of time), gets fewer, and so does the first with
    the embedding: the slowest stage sets the pace of all.
    """
    if layers % stages == 0:
        return (layers // stages,) * stages
    weights = [0.0] * stages
    weights[-1] = head
    # The embedding costs little time, but memory: it decides between otherwise equal stages.
    weights[0] += 0.1
    counts = [0] * stages
    for _ in range(layers):
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
