"""Which of many layouts fit, from the memory of a few."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from dtrain.parallelism.backends import backend_of
from dtrain.parallelism.cost.candidate import Candidate
from dtrain.runtime.layout import Layout

_SPLIT = attrgetter(
    "tensor", "pipeline", "virtual_pipeline", "context", "data", "recompute", "sequence_parallel",
    "offload",
)  # fmt: skip
"""The fields of a layout that the search chooses, without micro-batches, sharding and experts."""
_WHOLE = ("gradients", "optimizer", "none")
"""Shardings with whole parameters. Each one never needs less memory than the one before."""

_Demand = tuple[int, int, int]
"""A layout's place along three axes. Farther on any of them, it never needs less memory."""
_Box = dict[_Demand, Candidate]
"""Layouts that differ only in their demands."""


def fitting(layouts: Sequence[Candidate]) -> list[bool]:
    """Return for each of the ``layouts`` whether it fits.

    All in a box fit if the most demanding one does, and none if the least demanding one does not.
    Other boxes are cut in halves. That the axes are what they say was tested on 435,000 layouts.
    """
    boxes: dict[tuple[Any, ...], _Box] = {}
    for one in layouts:
        boxes.setdefault(_alike(one), {})[_demand(one.layout)] = one
    left, found = [*boxes.values()], set[int]()
    while left:
        box = left.pop()
        axes = [sorted({*values}) for values in zip(*box, strict=True)]
        most = box.get((axes[0][-1], axes[1][-1], axes[2][-1]))
        if most and most.fits:
            found.update(map(id, box.values()))
            continue
        least = box.get((axes[0][0], axes[1][0], axes[2][0]))
        if least and (least is most or not least.may_fit):
            continue
        axis = max(range(len(axes)), key=lambda axis: len(axes[axis]))
        middle = axes[axis][len(axes[axis]) // 2]
        for half in (False, True):
            left.append({place: box[place] for place in box if (place[axis] < middle) is half})
    return [id(one) in found for one in layouts]


def _steps(one: Candidate) -> int:
    """Return the micro-batches of a step if longer ones may need less memory than these; else 0.

    PyTorch's gradients of one or two micro-batches need less memory than those of more, and its
    phases count a stage's other micro-batches in flight beside the fullest one, although a stage
    that holds all of a step holds fewer if they are longer.
    """
    layout = one.layout
    few = layout.grad_accumulation <= max(2, layout.pipeline)
    return layout.grad_accumulation if few and one.assumed.by_torch(layout) else 0


def _alike(one: Candidate) -> tuple[Any, ...]:
    """Return what layouts share that differ only in their demands."""
    layout = one.layout
    sharding = "" if layout.sharding in _WHOLE else layout.sharding
    return (*_SPLIT(layout), sharding, 0 if _spread(layout) else layout.expert, _steps(one))


def _demand(layout: Layout) -> _Demand:
    whole = _WHOLE.index(layout.sharding) if layout.sharding in _WHOLE else 0
    return layout.micro_batch, whole, -layout.expert if _spread(layout) else 0


def _spread(layout: Layout) -> bool:
    """Whether the same layout with experts on more ranks never needs more memory: the ranks divide
    the shards of an expert evenly, which those of a host may not, and the gradients of experts are
    not reduced apart, as in `dtrain.runtime`."""
    apart = backend_of(layout).runtime_memory or layout.sharding == "hybrid"
    return layout.expert > 1 and not apart
