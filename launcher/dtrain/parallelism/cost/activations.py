"""Activations that a layer keeps from its forward pass for its backward pass."""

from __future__ import annotations

from collections.abc import Iterator

from dtrain.parallelism.assumptions import Assumptions
from dtrain.parallelism.cost.layer import BYTES
from dtrain.parallelism.model.shape import Shape
from dtrain.runtime.layout import Layout


def layer_activations(shape: Shape, layout: Layout, assumed: Assumptions) -> float:
    """Return the bytes that one layer keeps for each token of a micro-batch.

    The terms follow RAR (arXiv 2205.05198, section 4.1), and add up to its 34·h with GELU and
    dropout. Gated MLPs and grouped keys have separate terms.
    """
    return sum(_saved(shape, layout, assumed)) * BYTES[assumed.precision] / 2


def _saved(shape: Shape, layout: Layout, assumed: Assumptions) -> Iterator[float]:
    """The terms, in bytes for 16-bit activations."""
    t = layout.tensor
    h, s = shape.hidden, shape.seq_len
    split = t if layout.sequence_parallel else 1
    yield 2 * h / split
    if layout.recompute == "full":
        return
    queries = shape.heads * shape.head_size
    values = shape.heads * (shape.value_head_size or shape.head_size)
    # Tensor parallelism copies key heads if there are fewer of them than ranks.
    keys = max(shape.kv_heads, min(t, shape.heads)) * shape.head_size
    grouped = keys if shape.value_head_size == 0 else values
    width = shape.ffn_hidden
    if shape.experts:
        width *= shape.experts_per_token + shape.shared_experts
        # The tokens sent to experts, and the experts' outputs.
        yield 4 * h * shape.experts_per_token / split
    if layout.recompute == "selective" and assumed.by_torch(layout):
        # torchtitan's policy: keep attention's and every second product's output, recompute the
        # rest.
        yield 2 * h / split
        yield 2 * (queries + grouped + values + width) / t
        return
    # Inputs of both norms (one yielded above) and their outputs, the products' inputs.
    yield 6 * h / split
    if shape.dropout:
        yield 2 * h / split
    if shape.kv_rank:
        keys = queries
        yield 2 * (shape.query_rank + shape.kv_rank + shape.rope_head_size)
    yield 2 * (queries + keys + grouped + values) / t
    if not assumed.flash_attention and layout.recompute != "selective":
        yield (5 if shape.dropout else 4) * shape.heads * s / t
    # Megatron-LM's fused SwiGLU recomputes its output; torch keeps two more tensors.
    matrices = (4 if assumed.by_torch(layout) else 3) if shape.gated else 2
    yield matrices * 2 * width / t
