"""Which of many layouts fit, from the memory of a few."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from operator import attrgetter
from typing import Any

from dtrain.parallelism.backends import backend_of
from dtrain.parallelism.cost.candidate import Candidate
from dtrain.records import cached_property
from dtrain.runtime.layout import Layout

_SPLIT = attrgetter(
    "tensor", "pipeline", "virtual_pipeline", "context", "data", "recompute", "sequence_parallel",
    "offload",
)  # fmt: skip
"""The fields of a layout that the search chooses, without micro-batches, sharding and experts."""
_WHOLE = {"gradients": 1, "optimizer": 2, "none": 4}
"""Shardings with whole parameters. Each one never needs less memory than the one before."""

_Demand = tuple[float, float, float]
"""A layout's place along each axis. Farther on any of them, it never needs less memory."""
_Box = dict[_Demand, int]
"""The numbers of layouts that differ only in their demands."""


class Boxes:
    """Layouts in boxes. That the axes are what they say was tested on 1.4 million layouts."""

    def __init__(self, layouts: Sequence[Candidate]) -> None:
        self._layouts = layouts
        boxes: dict[tuple[Any, ...], _Box] = {}
        for place, one in enumerate(layouts):
            shared, demand = _place(one)
            boxes.setdefault(shared, {})[demand] = place
        self._boxes = [*boxes.values()]

    @cached_property
    def leanest(self) -> list[Candidate]:
        """For each layout, the one of its box that needs the least memory; itself if that is
        unknown."""
        found = [*self._layouts]
        for box in self._boxes:
            least = min(box, key=prod)
            for demand, place in box.items():
                if _within(least, demand):
                    found[place] = self._layouts[box[least]]
        return found

    @cached_property
    def larger_than(self) -> list[Candidate | None]:
        """For each layout that does not fit, one that needs no more memory and does not fit; None
        for each one that fits."""
        found: list[Candidate | None] = [None] * len(self._layouts)
        for box in self._boxes:
            left = sorted(box, key=prod)
            # All fit if the most demanding one does, and none if the least demanding one does not.
            tried = [left[-1], left[0]]
            while left:
                # It takes longer to show that a layout fits than that it does not.
                one = tried.pop(0) if tried else left[2 * len(left) // 3]
                layout = self._layouts[box[one]]
                if layout.fits:
                    left = [demand for demand in left if not _within(demand, one)]
                    continue
                for demand in left:
                    if _within(one, demand):
                        found[box[demand]] = layout
                left = [demand for demand in left if not _within(one, demand)]
        return found


def _within(less: _Demand, more: _Demand) -> bool:
    """Whether ``more`` is as far as ``less``, or farther, along each axis."""
    return less[0] <= more[0] and less[1] <= more[1] and less[2] <= more[2]


def _steps(one: Candidate) -> int:
    """Return the micro-batches of a step if longer ones may need less memory than these; else 0.

    PyTorch's gradients of one or two micro-batches need less memory than those of more, and its
    phases count a stage's other micro-batches in flight beside the fullest one, although a stage
    that holds all of a step holds fewer if they are longer.
    """
    layout = one.layout
    few = layout.grad_accumulation <= max(2, layout.pipeline)
    return layout.grad_accumulation if few and one.assumed.by_torch(layout) else 0


def _place(one: Candidate) -> tuple[tuple[Any, ...], _Demand]:
    """Return what layouts share that differ only in their demands, and the demand."""
    layout = one.layout
    whole, spread = _WHOLE.get(layout.sharding), _spread(layout)
    shared = "" if whole else layout.sharding, 0 if spread else layout.expert, _steps(one)
    demand = layout.micro_batch, whole or 1, 1 / layout.expert if spread else 1.0
    return (*_SPLIT(layout), *shared), demand


def _spread(layout: Layout) -> bool:
    """Whether the same layout with experts on more ranks never needs more memory: the ranks divide
    the shards of an expert evenly, which those of a host may not, and the gradients of experts are
    not reduced apart, as in `dtrain.runtime`."""
    apart = backend_of(layout).runtime_memory or layout.sharding == "hybrid"
    return layout.expert > 1 and not apart
