"""The matrix products of one layer and micro-batch on one GPU."""

from __future__ import annotations

from collections.abc import Iterator

from dtrain.parallelism.model.shape import Shape
from dtrain.records import dataclass
from dtrain.runtime.layout import Layout


@dataclass(frozen=True, slots=True)
class Product:
    """``count`` consecutive matrix products of (m × k) with (k × n)."""

    m: float
    k: float
    n: float
    count: int = 1

    @property
    def flop(self) -> float:
        return 2.0 * self.m * self.k * self.n * self.count

    @property
    def weights(self) -> float:
        return self.k * self.n * self.count


def tokens(shape: Shape, layout: Layout) -> float:
    """Tokens of one micro-batch on one GPU: s·b, divided by the context ranks."""
    return shape.seq_len * layout.micro_batch / layout.context


def products(shape: Shape, layout: Layout, *, moe: bool) -> Iterator[Product]:
    """Yield the products with weights of one layer's forward pass, without those of `grouped`."""
    t, n, h = layout.tensor, tokens(shape, layout), shape.hidden
    if shape.heads:
        yield from _projections(shape, layout)
    for part in shape.parts:
        yield from (Product(n * rows, k, out) for rows, k, out in part.products(h, t))
    if not shape.ffn_hidden:
        return
    widths = 2 if shape.gated else 1
    if not moe:
        dense = (shape.dense_ffn_hidden if shape.experts else 0) or shape.ffn_hidden
        yield Product(n, h, widths * dense / t)
        yield Product(n, dense / t, h)
        return
    f = shape.ffn_hidden / t
    yield Product(n, h, shape.experts)
    if shape.shared_experts:
        yield Product(n, h, widths * f * shape.shared_experts)
        yield Product(n, f * shape.shared_experts, h)


def grouped(shape: Shape, layout: Layout, *, copies: float, whole: bool) -> Iterator[Product]:
    """Yield the products of one rank's routed experts, with ``copies`` experts for each token.

    ``whole``: the tensor ranks hold different experts, and not parts of each.
    """
    t, h = layout.tensor, shape.expert_width
    experts = shape.experts // layout.expert
    routed = tokens(shape, layout) * copies * layout.expert / shape.experts
    count, width = (experts // t, shape.ffn_hidden) if whole else (experts, shape.ffn_hidden / t)
    yield Product(routed, h, (2 if shape.gated else 1) * width, count)
    yield Product(routed, width, h, count)


def _projections(shape: Shape, layout: Layout) -> Iterator[Product]:
    """Yield attention's products: to queries, keys and values, and back from the heads."""
    t, n, h = layout.tensor, tokens(shape, layout), shape.hidden
    queries = shape.heads * shape.head_size
    values = shape.heads * (shape.value_head_size or shape.head_size)
    if shape.kv_rank:
        # Every tensor rank computes whole latents; only products of latents are split.
        yield Product(n, h, shape.query_rank + shape.kv_rank + shape.rope_head_size)
        yield from up_projections(shape, layout)
    else:
        # If there are fewer key heads than tensor ranks, they are copied, not split.
        keys = max(shape.kv_heads / t, 1) * shape.head_size
        yield Product(n, h, queries / t + 2 * keys)
    yield Product(n, values / t, h)


def up_projections(shape: Shape, layout: Layout) -> Iterator[Product]:
    """Yield MLA's products of latents, to queries, and to keys and values."""
    t, n = layout.tensor, tokens(shape, layout)
    queries = shape.heads * shape.head_size
    yield Product(n, shape.query_rank or shape.hidden, queries / t)
    unrotated = queries - shape.heads * shape.rope_head_size
    values = shape.heads * (shape.value_head_size or shape.head_size)
    yield Product(n, shape.kv_rank, (unrotated + values) / t)
