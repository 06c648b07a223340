"""The layout of a run: from the cluster file, the script or the strategy's default."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import get_args

from dtrain.runtime.layout import SCHEDULES, SIZES, Layout, Recompute, Reduce, Sharding, Training
from dtrain.runtime.layout_rules import contradictions, torch_limits, uneven_rounds
from dtrain.runtime.torch.precision import COMPUTE

STRATEGIES = ("none", "data_parallel", "ddp", "fsdp", "hsdp", "tensor", "pipeline", "3d")


@dataclass(frozen=True, slots=True)
class StartedRanks:
    """The processes that a launch has started."""

    size: int
    local_size: int
    """Ranks on one host."""
    devices: int = 1
    """GPUs that this process sees; 1 if it computes on the CPU."""


def resolve(
    strategy: str,
    layout: Layout | None,
    training: Training,
    world: StartedRanks,
    *,
    own_batch: bool = False,
) -> Layout:
    """A complete layout for ``world``. The global batch determines ``grad_accumulation``.

    A layout with ``grad_accumulation`` sets its own global batch, which must agree with
    ``training``. With ``own_batch``, the batch in ``training`` is the script's default and may
    differ.

    Raises ValueError for a layout that the runtime cannot train or would train incorrectly.
    """
    _one_of("strategy", strategy, STRATEGIES)
    if training.precision in ("fp8", "nvfp4"):
        raise ValueError(
            f"precision {training.precision} needs Transformer Engine or torchao, which this"
            " runtime does not support; use bf16"
        )
    if training.state_bits not in (None, 32):
        raise ValueError(
            f"state_bits {training.state_bits}: this runtime keeps weights in 32 bits; leave it out"
        )
    if training.overlap_experts:
        raise ValueError(
            "overlap_experts: this runtime does not exchange tokens beside the computation; leave"
            " it out"
        )
    if training.cuda_graph:
        raise ValueError(
            "cuda_graph: this runtime has no CUDA graph of the whole step; leave it out"
        )
    _one_of("precision", training.precision or "fp32", tuple(COMPUTE))
    fixed = layout is not None and layout.grad_accumulation != 1 and not own_batch
    layout = layout or _batched(_by_name(strategy, world), training)
    _check_values(layout)
    if layout.sharding == "hybrid" and layout.shard is None:
        layout = replace(layout, shard=_shard_within_a_host(layout, world))
    if layout.schedule == "zb-v" and layout.virtual_pipeline == 1:
        layout = replace(layout, virtual_pipeline=2)
    layout = _accumulating(layout, training, fixed=fixed)
    _check_ranks(strategy, layout, world)
    for misfit in chain(contradictions(layout), torch_limits(layout), uneven_rounds(layout)):
        raise ValueError(f"{misfit.message}; {misfit.hint}")
    return layout


def over(script: Training, cluster_file: Training) -> Training:
    """The cluster file's values, with the script's values as defaults."""
    chosen = {field.name: getattr(cluster_file, field.name) for field in fields(Training)}
    return replace(script, **{name: value for name, value in chosen.items() if value is not None})


def _one_of(key: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"{key} {value!r} is not one of {', '.join(known)}")


def _by_name(strategy: str, world: StartedRanks) -> Layout:
    """The default layout of a strategy."""
    if strategy == "3d":
        raise ValueError(
            "strategy 3d needs a layout: give tensor, pipeline and data, whose product is the"
            f" world size of {world.size}"
        )
    return {
        "none": Layout(data=world.size),
        "data_parallel": Layout(data=world.devices),
        "ddp": Layout(data=world.size),
        "fsdp": Layout(data=world.size, sharding="full" if world.size > 1 else "none"),
        "hsdp": Layout(data=world.size, sharding="hybrid" if world.size > 1 else "none"),
        "tensor": Layout(tensor=world.size, sequence_parallel=world.size > 1),
        "pipeline": Layout(pipeline=world.size, grad_accumulation=2 * world.size),
    }[strategy]


def _batched(layout: Layout, training: Training) -> Layout:
    """Micro-batches as a launch creates them: as few and as large as possible. A pipeline gets the
    number from `_by_name`."""
    share, rest = divmod(training.global_batch or layout.global_batch, layout.data)
    if rest:
        return layout
    steps = layout.grad_accumulation if share % layout.grad_accumulation == 0 else share
    return replace(layout, micro_batch=share // steps, grad_accumulation=steps)


def _shard_within_a_host(layout: Layout, world: StartedRanks) -> int:
    """The largest number of data ranks that fits on one host and divides all data ranks."""
    return math.gcd(layout.data, max(1, world.local_size // layout.tensor))


def _accumulating(layout: Layout, training: Training, *, fixed: bool) -> Layout:
    if training.global_batch is None or training.global_batch == layout.global_batch:
        return layout
    at_once = layout.data * layout.micro_batch
    batch = training.global_batch
    if fixed:
        raise ValueError(
            f"the layout sets a global batch of {layout.global_batch}"
            f" ({layout.product(('data', 'micro_batch', 'grad_accumulation'))}),"
            f" but training.global_batch is {batch}; remove one of the two"
        )
    if batch < 1 or batch % at_once:
        raise ValueError(
            f"a global batch of {batch} cannot be shared by"
            f" {layout.product(('data', 'micro_batch'))}; use a multiple of {at_once}"
        )
    return replace(layout, grad_accumulation=batch // at_once)


def _check_values(layout: Layout) -> None:
    _one_of("sharding", layout.sharding, get_args(Sharding))
    _one_of("schedule", layout.schedule, SCHEDULES)
    _one_of("recompute", layout.recompute, get_args(Recompute))
    _one_of("reduce", layout.reduce, get_args(Reduce))
    if layout.backend != "runtime":
        raise ValueError(
            f"the layout is for the backend {layout.backend}; plan one for this runtime with"
            " `dtrain plan --backend runtime`"
        )
    for name in (*SIZES, "expert", "virtual_pipeline", "shard", "micro_batch", "grad_accumulation"):
        size = getattr(layout, name)
        if size is not None and size < 1:
            raise ValueError(f"{name} {size} is not a valid size; it must be at least 1")


def _check_ranks(strategy: str, layout: Layout, world: StartedRanks) -> None:
    if strategy == "data_parallel":
        if world.size != 1 or layout.world_size != layout.data:
            raise ValueError(
                "strategy data_parallel copies a whole model to the GPUs of one process; with"
                f" {world.size} processes, or a split model, use ddp or 3d"
            )
        if layout.sharding != "none" or layout.offload or layout.recompute != "none":
            raise ValueError(
                "strategy data_parallel does not shard, offload or recompute; use ddp or fsdp"
            )
    elif layout.world_size != world.size:
        raise ValueError(
            f"the layout is for {layout.world_size} ranks"
            f" ({layout.product(SIZES)}), but {world.size} were started"
        )
    batches, ranks = layout.grad_accumulation, layout.pipeline
    if layout.schedule != "gpipe" and batches < ranks:
        raise ValueError(
            f"schedule {layout.schedule} needs at least as many micro-batches as pipeline ranks:"
            f" grad_accumulation is {batches}, pipeline {ranks}; raise the global batch to"
            f" {layout.data * layout.micro_batch * ranks} or more"
        )
