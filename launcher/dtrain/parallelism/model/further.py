"""Further tokens that each position predicts (multi-token prediction, MTP)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import ClassVar

from dtrain.diagnostics import UsageError
from dtrain.parallelism.model.parts import LayerPart
from dtrain.parallelism.model.shape import Shape
from dtrain.records import dataclass

MOST = 8
"""Further tokens; no published model predicts as many."""


@dataclass(frozen=True)
class FurtherToken(LayerPart):
    """What joins the hidden state and the embedding of the next token, before the layer that
    predicts one token further (DeepSeek-V3, arXiv 2412.19437, eq. 21): a norm of each, and a
    product of both. After the layer comes a third norm."""

    title: ClassVar[str] = "predictions of further tokens (MTP)"
    short: ClassVar[str] = "MTP"
    own_sum: ClassVar[bool] = False

    def parameters(self, hidden: int) -> int:
        return 2 * hidden * hidden + 3 * hidden

    def products(self, hidden: int, tensor: int) -> Iterator[tuple[float, float, float]]:
        yield 1.0, 2 * hidden, hidden / tensor

    def split_passes(self, hidden: int) -> float:
        """The embedding, two norms, and the copy that joins them."""
        return 10.0 * hidden

    def kept(self, hidden: int, tensor: int, split: int) -> float:
        """The inputs of both norms, and the product's input."""
        return 2 * 4 * hidden / split


def with_further_tokens(shape: Shape, count: int) -> Shape:
    """Return the model that also predicts ``count`` further tokens, each with layers of its own
    and one more pass through the output layer.

    These layers are the last one with attention, and if that has no MLP, the last one with one.

    Raises:
        UsageError: the number is not possible, the model does not predict the next token, or only
            adapters are trained.
    """
    if not count:
        return shape
    if not 1 <= count <= MOST:
        raise UsageError(f"`mtp={count}` is not a number of tokens", hint=f"0 to {MOST}")
    if shape.target_len or shape.input_parameters or not shape.causal:
        raise UsageError(
            f"`mtp={count}`: {shape.name or 'this model'} does not predict the next token",
            hint="leave it out, or choose another model",
        )
    if shape.lora is not None:
        raise UsageError(f"`mtp={count}` does not go with `lora_rank`", hint="leave one out")
    layers = shape.pattern or _every_layer(shape)
    first, *others = _block(layers)
    first = replace(first, parts=(FurtherToken(), *first.parts))
    pattern = (*layers, *(first, *others) * count)
    return replace(
        shape,
        layers=len(pattern),
        dense_layers=0,
        dense_ffn_hidden=0,
        parts=(),
        pattern=pattern,
        target_len=shape.seq_len * (1 + count),
    )


@lru_cache(maxsize=4096)
def further_layers(shape: Shape) -> int:
    """Return the number of layers at the end that predict further tokens."""
    first = (
        place
        for place, kind in enumerate(shape.pattern)
        if any(isinstance(part, FurtherToken) for part in kind.parts)
    )
    return len(shape.pattern) - next(first, len(shape.pattern))


def most_stages(shape: Shape) -> int:
    """Return the maximum number of pieces of a pipeline. Megatron-Core has all layers that predict
    further tokens on one stage (``get_mtp_num_layers_to_build``)."""
    return shape.layers - max(0, further_layers(shape) - 1)


def _every_layer(shape: Shape) -> tuple[Shape, ...]:
    """Return each layer of a model without a pattern."""
    usual = replace(shape, layers=1, dense_layers=0, dense_ffn_hidden=0, name="")
    dense = replace(
        usual,
        experts=0,
        experts_per_token=0,
        shared_experts=0,
        ffn_hidden=shape.dense_ffn_hidden or shape.ffn_hidden,
    )
    return (dense,) * shape.dense_layers + (usual,) * (shape.layers - shape.dense_layers)


def _block(layers: tuple[Shape, ...]) -> tuple[Shape, ...]:
    """Return the layers that predict a token."""
    attending = next((kind for kind in reversed(layers) if kind.heads), layers[-1])
    if attending.ffn_hidden:
        return (attending,)
    return attending, *[kind for kind in reversed(layers) if kind.ffn_hidden][:1]
