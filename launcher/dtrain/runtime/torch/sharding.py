"""Data parallelism: copies (DDP), and states divided among the data ranks (ZeRO, arXiv 1910.02054,
with FSDP2's ``fully_shard``)."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel

from dtrain.runtime.layout import Layout
from dtrain.runtime.torch.precision import COMPUTE


def by_fsdp(layout: Layout, precision: str) -> bool:
    """Whether FSDP2 manages the parameters.

    It also manages plain copies (over a mesh with shards of size 1) where DDP cannot: DDP's reducer
    supports neither split tensors, a pipeline's order of backward passes, ranks with different
    experts, nor sums in 16 bits on every device. And it casts split
    models to 16 bits, even on one data rank: under autocast the residual stream stays in 32 bits.
    Zero-bubble schedules need autocast, because they split the backward pass that FSDP hooks into.
    """
    split = layout.tensor > 1 or layout.pipeline > 1
    casts = COMPUTE[precision] is not torch.float32 and not layout.schedule.startswith("zb-")
    differ = (
        layout.expert > 1 or layout.reduce != "fp32" or (split and (layout.copies > 1 or casts))
    )
    return layout.offload or layout.sharding != "none" or differ


def mesh_sizes(layout: Layout) -> tuple[int, int]:
    """The number of copies of the states, and the number of ranks that share one copy."""
    return layout.copies // layout.shards, layout.shards


class Sharder:
    """Divides modules among the data ranks, as the layout requires."""

    def __init__(self, layout: Layout, mesh: DeviceMesh, precision: str) -> None:
        if layout.tensor > 1:
            # Outputs of split layers are views; `TensorSplit` copies the one where that matters.
            warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        self._mesh = mesh
        copied = layout.sharding in ("none", "hybrid")
        self._dimensions = ("replicate", "shard") if copied else ("shard",)
        self._reshard = layout.shards_parameters
        self._precision = MixedPrecisionPolicy(
            param_dtype=None if COMPUTE[precision] is torch.float32 else COMPUTE[precision],
            reduce_dtype=COMPUTE[layout.reduce],
        )
        self._offload: OffloadPolicy = (
            CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
            if layout.offload
            else OffloadPolicy()
        )

    def __call__(self, module: nn.Module, mesh: DeviceMesh | None = None) -> None:
        """Shard the parameters of ``module`` that are not sharded yet. They are gathered
        together. ``mesh``: if not all data ranks hold them."""
        fully_shard(
            module,
            mesh=(mesh or self._mesh)[self._dimensions],
            reshard_after_forward=self._reshard,
            mp_policy=self._precision,
            offload_policy=self._offload,
        )


def copies(module: nn.Module, device: torch.device) -> DistributedDataParallel:
    """``module`` with its gradients averaged over all ranks."""
    return DistributedDataParallel(
        module, device_ids=[device.index] if device.type == "cuda" else None
    )


def reducing(module: nn.Module, layout: Layout, *, last: bool) -> AbstractContextManager[None]:
    """Context for the forward and backward pass of one micro-batch. ``last``: the last in its step.

    Unsharded gradients are averaged once, after the last micro-batch. ZeRO-2 and FSDP reduce them
    every time and keep only a shard in between.
    """
    if isinstance(module, DistributedDataParallel):
        return nullcontext() if last else module.no_sync()
    if isinstance(module, FSDPModule):
        module.set_is_last_backward(last)
        if layout.sharding in ("none", "optimizer"):
            module.set_requires_gradient_sync(last)
        module.set_requires_all_reduce(last)
        module.set_reshard_after_backward(last or layout.shards_parameters)
    return nullcontext()


def gather_no_more(module: nn.Module) -> None:
    """Free the whole parameters that a forward pass without a backward pass has left."""
    for inner in module.modules():
        if isinstance(inner, FSDPModule):
            inner.reshard()


def shard_parts(sharder: Sharder, root: nn.Module, parts: Iterable[nn.Module]) -> None:
    """Shard each of ``parts`` separately, then the rest of ``root``."""
    for part in parts:
        if any(True for _ in part.parameters()):
            sharder(part)
    sharder(root)
