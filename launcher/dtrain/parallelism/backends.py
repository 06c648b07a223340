"""Software that can train a layout: what each one can do, and what its memory and speed follow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dtrain.parallelism.cluster.hardware import Precision
from dtrain.parallelism.model.shape import Shape
from dtrain.runtime.layout import BackendName, Layout


@dataclass(frozen=True, slots=True)
class Backend:
    """One row of the table. A feature that is False is never in a plan for this backend."""

    name: BackendName
    title: str
    runtime_memory: bool = False
    """Whether memory is that of ``dtrain.runtime``: 32-bit master weights under FSDP, autograd's
    own saved tensors, a receive buffer for each micro-batch of a pipeline."""
    torch_kernels: bool = False
    """PyTorch's own kernels in every layout: SwiGLU keeps its parts, and selective recompute is
    torchtitan's. Without, only where parameters are sharded."""
    exposed_tensor: float | None = None
    """Share of tensor-parallel traffic that computation does not hide; None for the fitted one."""
    sends_shares: bool = True
    """Whether each tensor rank sends its share of an activation to the next stage even without
    sequence parallelism (scatter-gather, SC21 section 4.1)."""
    context: bool = True
    expert: bool = True
    fp8: bool = True
    copies_keys: bool = True
    """Whether heads of keys that are fewer than the tensor ranks are copied."""
    pads_vocabulary: bool = True
    """Whether a vocabulary that the tensor ranks do not divide is padded."""
    splits_any_layer: bool = True
    """Whether tensor parallelism takes experts and latent attention (MLA)."""
    ties_across_stages: bool = True
    """Whether a pipeline's ends can share the matrix of the vocabulary."""
    shards_stages: bool = True
    """Whether a plan shards the parameters of pipeline stages. Each micro-batch gathers them."""


BACKENDS: dict[BackendName, Backend] = {
    backend.name: backend
    for backend in (
        Backend(
            "runtime",
            "dtrain.runtime, which `dtrain launch` runs",
            runtime_memory=True,
            torch_kernels=True,
            exposed_tensor=1.0,
            sends_shares=False,
            context=False,
            expert=False,
            fp8=False,
            copies_keys=False,
            pads_vocabulary=False,
            splits_any_layer=False,
            ties_across_stages=False,
            shards_stages=False,
        ),
        Backend("megatron", "Megatron-LM or NeMo"),
        Backend("torchtitan", "torchtitan", torch_kernels=True, copies_keys=False),
    )
}


def backend_of(layout: Layout) -> Backend:
    """The table's row for ``layout``."""
    return BACKENDS[layout.backend]


def refusals(shape: Shape, layout: Layout, precision: Precision) -> Iterator[str]:
    """Why the layout's backend cannot train ``shape`` so; nothing where it can."""
    backend, t = backend_of(layout), layout.tensor
    for key in layout.split_by(("context", "expert")):
        if not getattr(backend, key):
            yield f"{key} parallelism"
    if precision == "fp8" and not backend.fp8:
        yield "fp8, which needs Transformer Engine or torchao"
    if t > 1 and shape.kv_heads % t and not shape.kv_rank and not backend.copies_keys:
        yield f"tensor {t} with {shape.kv_heads} heads of keys, which it does not divide"
    if t > 1 and shape.vocab % t and not backend.pads_vocabulary:
        yield f"tensor {t} with a vocabulary of {shape.vocab}, which it does not divide"
    if t > 1 and (shape.experts or shape.kv_rank) and not backend.splits_any_layer:
        yield "tensor parallelism of experts or of latent attention"
    if layout.pipeline > 1:
        if shape.tied and not backend.ties_across_stages:
            yield "a pipeline of a model whose embedding and output layer are one matrix"
        if layout.shards_parameters and layout.copies > 1 and not backend.shards_stages:
            yield "pipeline stages with sharded parameters"
        if layout.grad_accumulation < layout.pipeline and not backend.shards_stages:
            yield f"{layout.grad_accumulation} micro-batches for {layout.pipeline} stages"
