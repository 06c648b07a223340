"""Kernel launches of a layer: a GPU waits for a host that starts kernels too slowly."""

from __future__ import annotations

from dtrain.parallelism.assumptions import Assumptions
from dtrain.parallelism.model.shape import Shape
from dtrain.runtime.layout import Layout

SEPARATE_KERNELS = 24.0
"""Kernels of both norms (8 instead of 1 each) and of the rotation of queries and keys (6 instead of
1 each) beyond those of fused ones, in Hugging Face's models."""


def launches(shape: Shape, layout: Layout, assumed: Assumptions) -> float:
    """Approximate number of kernel launches for one layer and micro-batch, over all passes."""
    blocks = bool(shape.heads) + bool(shape.ffn_hidden)
    forward = (12.0 if assumed.flash_attention else 16.0) * blocks
    forward += sum(part.kernels for part in shape.parts)
    forward += SEPARATE_KERNELS * (assumed.separate_kernels and shape.gated)
    if shape.experts:
        # Routing, permutation, quantization and the work of modules: fitted to Qwen3-30B with
        # micro-batches of 1.
        forward += 100
        forward += assumed.expert_kernels * shape.experts / layout.expert
    else:
        forward += assumed.module_work
    forward += shape.lora.kernels if shape.lora else 0.0
    forward += assumed.host_work
    if layout.shards_parameters:
        forward += assumed.sharding_work
    recompute = {"full": 1.0, "selective": 0.5, "none": 0.0}[layout.recompute]
    return forward * (1 + 1.6 + recompute)
