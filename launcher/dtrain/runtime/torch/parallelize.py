"""Applies a layout to a model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dtrain.runtime.layout import Layout
from dtrain.runtime.progress import steps
from dtrain.runtime.torch import pipeline
from dtrain.runtime.torch.agreement import agreed
from dtrain.runtime.torch.anatomy import Anatomy, dissect
from dtrain.runtime.torch.context import SequenceShare
from dtrain.runtime.torch.dropout import Draws
from dtrain.runtime.torch.experts import ExpertSplit, banks
from dtrain.runtime.torch.logits import (
    of_split_logits,
    output_layer,
    same_when_split,
    within_split_logits,
)
from dtrain.runtime.torch.model import ParallelModel
from dtrain.runtime.torch.passes import (
    CountedLoss,
    Loss,
    MicroBatches,
    Passes,
    Pipelined,
    PreparedPasses,
    TargetCount,
    in_float32,
)
from dtrain.runtime.torch.precision import LossScale, autocast
from dtrain.runtime.torch.recompute import compiled, offload_activations, recompute
from dtrain.runtime.torch.sharding import Sharder, by_fsdp, copies, shard_parts
from dtrain.runtime.torch.tensor import COLUMN, ROW, TensorSplit
from dtrain.runtime.torch.timing import StepTimer
from dtrain.runtime.torch.weights import (
    Initializer,
    Materializer,
    refuse_different_weights,
    restore_ties,
    tied,
)


@dataclass(frozen=True, slots=True)
class Place:
    """The run's layout, and this rank's position in it."""

    strategy: str
    layout: Layout
    precision: str
    mesh: DeviceMesh
    device: torch.device
    share: SequenceShare | None
    """This rank's share of each sequence, under context parallelism."""
    experts: ExpertSplit | None

    @property
    def by_fsdp(self) -> bool:
        return by_fsdp(self.layout, self.precision)


def parallelize(
    model: nn.Module,
    place: Place,
    *,
    loss: Loss,
    count: TargetCount | None,
    init: Initializer | None,
    seed: int,
    blocks: str | None,
    column: Iterable[str],
    row: Iterable[str],
) -> ParallelModel:
    """See `ParallelRun.parallelize`."""
    layout = place.layout
    refuse_different_weights(model)
    split = _tensor_split(model, place, loss, blocks, frozenset(column), frozenset(row))
    with agreed():
        parts, held = _placed(model, place, Materializer(place.device, seed, init), blocks, split)
    scale = LossScale(place.precision == "fp16")
    loss = in_float32(of_split_logits(loss, split.mesh) if split.output else loss)
    counted = CountedLoss(loss, count, layout) if count is not None else None
    loss = counted or loss
    if layout.pipeline == 1:
        module = model if place.by_fsdp else _copied(model, place)
        passes: Passes = MicroBatches(module, layout, loss, scale)
    else:
        called = {
            number: stage if place.by_fsdp else autocast(stage, place.device, place.precision)
            for number, stage in parts.items()
        }
        group = place.mesh["pipeline"].get_group()
        passes = Pipelined(called, layout, group, place.device, loss, scale)
    if split.output:
        passes = PreparedPasses(passes, within_split_logits)
    if counted is not None:
        passes = PreparedPasses(passes, counted.counted)
    if place.share is not None:
        passes = PreparedPasses(passes, place.share.prepared)
    local = not place.by_fsdp and layout.tensor == layout.pipeline == layout.context == 1
    blocks_wait = layout.tensor > 1 or layout.context > 1 or layout.expert > 1
    # A compiled block does not call its layers.
    layers = blocks_wait and not layout.compile
    timer = StepTimer(list(parts.values()), place.device, local=local, blocks=held, layers=layers)
    # Stages differ in their work.
    steps.group = place.mesh["pipeline"].get_local_rank()
    draws = Draws(seed, place.mesh, place.device)
    draws.begin(0)
    return ParallelModel(list(parts.values()), passes, layout, place.mesh, scale, timer, draws)


def _tensor_split(
    model: nn.Module,
    place: Place,
    loss: Loss,
    blocks: str | None,
    column: frozenset[str],
    row: frozenset[str],
) -> TensorSplit:
    mesh, output = place.mesh["tensor"], ""
    if place.layout.tensor > 1:
        with agreed():
            output = output_layer(model, dissect(model, blocks), mesh.size())
        if output:
            vocabulary = model.get_parameter(f"{output}.weight").shape[0]
            output = output if same_when_split(loss, vocabulary, mesh, place.device) else ""
    return TensorSplit(
        mesh, place.layout.sequence_parallel, (COLUMN - row) | column, (ROW - column) | row, output
    )


def _placed(
    model: nn.Module,
    place: Place,
    materialize: Materializer,
    blocks: str | None,
    split: TensorSplit,
) -> tuple[dict[int, nn.Module], list[nn.Module]]:
    """The stages on this rank, by number, and their blocks. Without a pipeline, the whole model."""
    layout = place.layout
    cuts = layout.pipeline > 1 or layout.tensor > 1 or layout.context > 1
    changes = layout.recompute != "none" or layout.compile or layout.offload_activations
    if cuts or changes or place.by_fsdp:
        anatomy = dissect(model, blocks)
    else:
        # Copied whole, so that any model works.
        anatomy = Anatomy((), (), tuple(name for name, _ in model.named_children()))
    if layout.tensor > 1:
        # Test all blocks on every rank. The test copies share no tensor with the model.
        whole = {name: model.get_submodule(name) for name in anatomy.blocks}
        split.refuse(whole, materialize)
        split = split.with_draws(whole, materialize)
    if place.experts is not None:
        place.experts.refuse(model)
    if place.share is not None:
        place.share.refuse(model, anatomy, materialize)
    placer = _Placer(anatomy, tied(model), place, materialize, split)
    if layout.pipeline == 1:
        placer(model)
        return {0: model}, placer.blocks(model)

    pipeline.refuse_what_cannot_be_staged(model, anatomy, placer.ties)
    numbers = pipeline.stages_of_rank(layout, place.mesh["pipeline"].get_local_rank())
    held = pipeline.parts_of_stages(anatomy, layout.pipeline * len(numbers))
    pipeline.refuse_frozen_start(model, layout, held[0])
    stages = {number: pipeline.take_stage(model, held[number], anatomy) for number in numbers}
    for stage in stages.values():
        placer(stage)
    return stages, [block for stage in stages.values() for block in placer.blocks(stage)]


def _copied(model: nn.Module, place: Place) -> nn.Module:
    """Wrap ``model`` if FSDP does not handle it."""
    module = autocast(model, place.device, place.precision)
    if place.strategy == "data_parallel":
        # It wraps only GPU modules, and uses all visible GPUs by default.
        return nn.DataParallel(module) if place.device.type == "cuda" else module
    return copies(module, place.device) if place.layout.copies > 1 else module


@dataclass(frozen=True, slots=True)
class _Placer:
    """Materializes, splits and shards a model or a stage, one block at a time to save memory."""

    anatomy: Anatomy
    ties: dict[str, str]
    place: Place
    materialize: Materializer
    split: TensorSplit

    def __call__(self, part: nn.Module) -> None:
        layout = self.place.layout
        sharder = (
            Sharder(layout, self.place.mesh, self.place.precision) if self.place.by_fsdp else None
        )
        for name, block in self._present(part, self.anatomy.blocks).items():
            if self.place.experts is not None:
                self.place.experts(block)
            self.materialize(name, block)
            if layout.tensor > 1:
                self.split.block(block)
            if self.place.share is not None:
                self.place.share.block(block)
            recompute(block, layout.recompute)
            if layout.compile:
                compiled(block)
            if layout.offload_activations:
                offload_activations(block, self.place.device)
            if sharder is not None:
                if self.place.experts is not None:
                    for bank in banks(block).values():
                        sharder(bank, self.place.experts.mesh)
                sharder(block)
        around = self._present(part, self.anatomy.around)
        for name, module in around.items():
            self.materialize(name, module)
            if layout.tensor > 1:
                self.split.around(name, module)
        self.materialize.holders(part, (*self.anatomy.around, *self.anatomy.blocks))
        restore_ties(part, self.ties)
        if sharder is not None:
            # Tied parameters are gathered together, with everything outside the blocks.
            shard_parts(sharder, part, () if self.ties else around.values())

    def blocks(self, part: nn.Module) -> list[nn.Module]:
        """The blocks of a model or a stage."""
        return list(self._present(part, self.anatomy.blocks).values())

    def _present(self, part: nn.Module, names: Iterable[str]) -> dict[str, nn.Module]:
        modules = {name: part.get_submodule(name) for name in names}
        return {
            name: module
            for name, module in modules.items()
            if not isinstance(module, pipeline.PassThrough)
        }
