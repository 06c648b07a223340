"""Kernels of a layer, and their launches: a GPU waits for a host that starts them too slowly."""

from __future__ import annotations

from dtrain.parallelism.assumptions import Assumptions
from dtrain.parallelism.model.shape import Shape
from dtrain.runtime.layout import Layout

SEPARATE_KERNELS = 24.0
"""Kernels of both norms (8 instead of 1 each) and of the rotation of queries and keys (6 instead of
1 each) beyond those of fused ones, in Hugging Face's models."""

COMPUTED = 1 + 1.6
"""Kernels of the forward and the backward pass for each one of the forward pass."""
RECOMPUTED = {"full": 1.0, "selective": 0.5, "none": 0.0}
"""The same of recomputation."""


def kernels(shape: Shape, layout: Layout, assumed: Assumptions) -> float:
    """Approximate number of kernels of one layer and micro-batch in the forward pass, without those
    that route and permute tokens."""
    blocks = bool(shape.heads) + bool(shape.ffn_hidden)
    forward = (12.0 if assumed.flash_attention else 16.0) * blocks
    forward += sum(part.kernels for part in shape.parts)
    forward += SEPARATE_KERNELS * (assumed.separate_kernels and shape.gated)
    if shape.experts:
        forward += assumed.expert_kernels * shape.experts / layout.expert
    forward += shape.lora.kernels if shape.lora else 0.0
    return forward


def launches(shape: Shape, layout: Layout, assumed: Assumptions) -> float:
    """Host time of one layer and micro-batch over all passes, as an approximate number of kernel
    launches: those of `kernels`, and the host's other work."""
    # Routing, permutation, quantization and the work of modules: fitted to Qwen3-30B with
    # micro-batches of 1.
    beside = 100.0 if shape.experts else assumed.module_work
    beside += assumed.host_work
    if layout.shards_parameters:
        beside += assumed.sharding_work
    return (kernels(shape, layout, assumed) + beside) * (COMPUTED + RECOMPUTED[layout.recompute])
