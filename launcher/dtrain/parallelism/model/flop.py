"""FLOPs of a model's layers, for one token."""

from __future__ import annotations

from dtrain.parallelism.model.shape import Shape


def attention_flop(shape: Shape, *, causal: bool) -> float:
    """FLOPs of one token's attention in the forward pass, over all layers."""
    if shape.pattern:
        return sum(
            count * attention_flop(kind, causal=causal) * kind.seq_len / shape.seq_len
            for kind, count in shape.kinds
        )
    width = shape.head_size + (shape.value_head_size or shape.head_size)
    every = 2.0 * shape.layers * shape.seq_len * shape.heads * width * shape.attended_share
    return every / 2 if causal and shape.causal else every


def products_flop(shape: Shape) -> float:
    """FLOPs of one token's products with weights and of its recurrences in the forward pass of all
    layers and the output layer, for models with parts or a pattern."""
    kinds = shape.kinds or ((shape, shape.layers),)
    layers = sum(count * kind.layer_flop * kind.seq_len for kind, count in kinds)
    head = 2.0 * shape.head_parameters * (shape.target_len or shape.seq_len)
    return (layers + head) / shape.seq_len
