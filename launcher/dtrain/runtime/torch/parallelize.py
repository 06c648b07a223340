"""Put a model under a layout."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dtrain.runtime.layout import Layout
from dtrain.runtime.torch import pipeline
from dtrain.runtime.torch.anatomy import Anatomy, dissect
from dtrain.runtime.torch.model import ParallelModel
from dtrain.runtime.torch.passes import Loss, MicroBatches, Passes, Pipelined, in_float32
from dtrain.runtime.torch.precision import LossScale, autocast
from dtrain.runtime.torch.recompute import recompute
from dtrain.runtime.torch.sharding import Sharder, by_fsdp, copies, shard_parts
from dtrain.runtime.torch.tensor import COLUMN, ROW, TensorSplit
from dtrain.runtime.torch.weights import (
    Initializer,
    Materializer,
    refuse_different_weights,
    tie_again,
    tied,
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a model is put: the run's layout, and this rank's part in it."""

    strategy: str
    layout: Layout
    precision: str
    mesh: DeviceMesh
    device: torch.device


def parallelize(
    model: nn.Module,
    place: Place,
    *,
    loss: Loss,
    init: Initializer | None,
    seed: int,
    blocks: str | None,
    column: Iterable[str],
    row: Iterable[str],
) -> ParallelModel:
    """See `Run.parallelize`."""
    layout = place.layout
    refuse_different_weights(model)
    ties = tied(model)
    materialize = Materializer(place.device, seed, init)
    scale = LossScale(place.precision == "fp16")
    loss = in_float32(loss)
    if not _needs_anatomy(layout):
        materialize("", model)
        wrapped = _copied(model, place)
        autocast(wrapped, place.device, place.precision)
        passes: Passes = MicroBatches(wrapped, layout, loss, scale)
        return ParallelModel([model], passes, layout, place.mesh, scale)

    anatomy = dissect(model, blocks)
    numbers = [0]
    parts = [model]
    if layout.pipeline > 1:
        pipeline.refuse_what_cannot_be_staged(model, anatomy, ties)
        numbers = pipeline.stages_of_rank(layout, place.mesh["pipeline"].get_local_rank())
        held = pipeline.parts_of_stages(anatomy, layout.pipeline * len(numbers))
        parts = [pipeline.take_stage(model, held[number], anatomy) for number in numbers]
    split = None
    if layout.tensor > 1:
        names = frozenset(column), frozenset(row)
        split = TensorSplit(
            place.mesh["tensor"],
            layout.sequence_parallel,
            (COLUMN - names[1]) | names[0],
            (ROW - names[0]) | names[1],
        )
    for part in parts:
        _place(part, anatomy, ties, place, materialize, split)
    if layout.pipeline == 1:
        return ParallelModel(
            parts, MicroBatches(parts[0], layout, loss, scale), layout, place.mesh, scale
        )
    build = partial(
        pipeline.build_schedule,
        layout,
        parts,
        numbers,
        place.mesh["pipeline"].get_group(),
        place.device,
    )
    last = layout.pipeline * len(numbers) - 1
    passes = Pipelined(build, loss, scale, first=0 in numbers, last=last in numbers)
    return ParallelModel(parts, passes, layout, place.mesh, scale)


def _needs_anatomy(layout: Layout) -> bool:
    return (
        layout.tensor > 1
        or layout.pipeline > 1
        or layout.recompute != "none"
        or by_fsdp(layout)
    )


def _copied(model: nn.Module, place: Place) -> nn.Module:
    if place.strategy == "data_parallel":
        return nn.DataParallel(model)
    return copies(model, place.device) if place.layout.data > 1 else model


def _place(
    part: nn.Module,
    anatomy: Anatomy,
    ties: dict[str, str],
    place: Place,
    materialize: Materializer,
    split: TensorSplit | None,
) -> None:
    """Materialize, split and shard a stage, block by block: never all of it at once."""
    layout = place.layout
    sharder = Sharder(layout, place.mesh, place.precision) if by_fsdp(layout) else None
    for name in anatomy.blocks:
        block = part.get_submodule(name)
        if isinstance(block, pipeline.PassThrough):
            continue
        materialize(name, block)
        if split is not None:
            split.block(name, block)
        recompute(block, layout.recompute)
        if sharder is not None:
            sharder(block)
    around = {
        name: module
        for name in anatomy.around
        if not isinstance(module := part.get_submodule(name), pipeline.PassThrough)
    }
    for name, module in around.items():
        materialize(name, module)
        if split is not None:
            split.around(name, module)
    materialize.holders(part, (*around, *anatomy.blocks))
    tie_again(part, ties)
    if sharder is not None:
        # Tied parameters are gathered together, with all that is not a block.
        shard_parts(sharder, part, [] if ties else around.values())
    else:
        autocast(part, place.device, place.precision)
