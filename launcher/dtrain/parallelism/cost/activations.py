"""Activations that a layer keeps from its forward pass for its backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from operator import attrgetter
from typing import Any, ParamSpec

from dtrain.parallelism.assumptions import Assumptions
from dtrain.parallelism.cost.layer import BYTES
from dtrain.parallelism.cost.stages import StageRank, kinds_of_stages
from dtrain.parallelism.model.shape import Shape, residual
from dtrain.runtime.layout import Layout, Recompute

_P = ParamSpec("_P")
SEPARATE_NORM = 6.0
"""Bytes of an element that an RMS norm keeps if each of its operations is a kernel: its input in 32
bits and the normalized one in 16 (``LlamaRMSNorm`` in Hugging Face's transformers)."""
NARROW = {"fp8": 1.0, "nvfp4": 0.5}
"""Bytes of an element that Transformer Engine keeps of a product's input: it saves the quantized
one (``saved_inputmat`` in ``module/linear.py``). torchao's float8 keeps the 16-bit one."""


def layer_activations(
    shape: Shape, layout: Layout, assumed: Assumptions, recompute: Recompute | None = None
) -> float:
    """Return the bytes that one layer keeps for each token of a micro-batch, or would keep with
    another ``recompute`` than the layout's.

    The terms follow RAR (arXiv 2205.05198, section 4.1), and add up to its 34·h with GELU and
    dropout. Gated MLPs and grouped keys have separate terms.
    """
    split = layout.tensor if layout.sequence_parallel else 1
    torch = assumed.unfused(layout)
    recompute = recompute or layout.recompute
    drops = recompute == "selective" and assumed.recomputes_modules(shape, layout)
    narrow = 2.0 if torch else NARROW.get(assumed.precision, 2.0)
    fused = assumed.habits.fused_gate
    terms = _saved(
        shape, layout.tensor, split, recompute, assumed.flash_attention, torch, drops,
        not torch if fused is None else fused, narrow, layout.compile,
        layout.expert > 1 and not assumed.habits.repeats_exchange,
    )  # fmt: skip
    if assumed.separate_kernels and torch and shape.gated and recompute == "none":
        normed = shape.sums * shape.hidden / split
        if shape.qk_norm:
            normed += (shape.heads + shape.kv_heads) * shape.head_size / layout.tensor
        terms += SEPARATE_NORM * normed
    if assumed.habits.copies_inputs and layout.tensor > 1 and recompute == "none":
        terms += 2 * shape.hidden * (5 if shape.gated else 2)
    apart = recompute == "full" and assumed.habits.recomputes_parts
    inputs = shape.sums if recompute == "none" or apart else 1
    if apart:
        terms += 2 * shape.hidden / split * (inputs - 1)
    if assumed.habits.wide_rest:
        terms += 2 * shape.hidden / split * inputs
    if assumed.habits.holds_outputs and recompute != "none":
        terms += 4 * shape.kv_heads * shape.head_size / layout.tensor
    # PyTorch's selective recomputation makes the copies again.
    if assumed.habits.repeats_keys and recompute in (("none",) if torch else ("none", "selective")):
        terms += 4 * (shape.heads - shape.kv_heads) * shape.head_size / layout.tensor
    if recompute == "none" and not shape.gated:
        terms += assumed.habits.gelu_bytes * shape.ffn_hidden / layout.tensor
    if assumed.habits.overwrites_mlp and recompute == "none":
        terms -= 2 * shape.ffn_hidden / layout.tensor
    if assumed.habits.frozen_inputs and recompute == "none":
        terms += _frozen_inputs(shape, layout.tensor, assumed.habits.frozen_inputs > 1)
    return terms * BYTES[assumed.precision] / 2


def score_activations(rank: StageRank) -> float:
    """Return the part of `largest_layer` that is attention's score matrix, if that is kept."""
    layout, assumed = rank.layout, rank.assumed
    scores = max(
        _scores(kind, layout.tensor, assumed.unfused(layout)) * kind.seq_len / rank.shape.seq_len
        for kind in rank.kinds
    )
    return scores * BYTES[assumed.precision] / 2


def _scores(shape: Shape, t: int, torch: bool) -> float:
    """Bytes of a token's scores. PyTorch's modules compute the softmax in 32 bits and keep it, and
    a copy in 16."""
    return (6 if torch else 5 if shape.dropout else 4) * shape.heads * shape.seq_len / t


def routed_activations(shape: Shape, layout: Layout, assumed: Assumptions) -> float:
    """Return the part of `layer_activations` without recomputation that depends on the experts to
    which tokens go."""
    if not shape.experts:
        return 0.0
    nowhere = replace(shape, experts_per_token=0)
    return layer_activations(shape, layout, assumed, "none") - layer_activations(
        nowhere, layout, assumed, "none"
    )


def routed_gradients(shape: Shape, layout: Layout, assumed: Assumptions) -> float:
    """Return the bytes per token of the largest gradients of its copies, one for each of its
    experts, that a backward pass holds at once: of an expert's output before and after the
    exchange, and of the inner activations."""
    if not shape.experts:
        return 0.0
    inner = (2 if shape.gated else 1) * shape.ffn_hidden / layout.tensor
    split = layout.tensor if layout.sequence_parallel else 1
    exchanged = 2 * shape.expert_width / split if layout.expert > 1 else 0.0
    return BYTES[assumed.precision] * shape.experts_per_token * (inner + exchanged)


def _frozen_inputs(shape: Shape, t: int, again: bool) -> float:
    """Return the bytes per token of the inputs of a layer's products with matrices of 4 bits, if
    these keep them (see `MemoryHabits.frozen_inputs`): those that adapters do not keep anyway, and
    if ``again`` those of the micro-batch before. The products hold them outside of autograd's
    reach, so they stay until the loop replaces the last loss."""
    lora = shape.lora
    if lora is None or not lora.expands:
        return 0.0
    output = shape.heads * (shape.value_head_size or shape.head_size) / t
    norms = 1 if shape.parallel else 2
    kept = output
    if again:
        kept += norms * shape.hidden + output + shape.ffn_hidden / t
    if lora.dropout:
        kept += shape.hidden
    if lora.dropout or not lora.adapts_mlp:
        kept += (norms - 1) * shape.hidden + shape.ffn_hidden / t
    return 2.0 * kept


def mean_activations(shape: Shape, layout: Layout, assumed: Assumptions, stage: int) -> float:
    """Return `layer_activations` of the mean layer of a stage, for each token of the model's
    sequence."""
    if not shape.pattern:
        return layer_activations(shape, layout, assumed)
    return _mean_of_pattern(shape, assumed, stage, layout.shards_parameters, _fields(layout))


_OF_ACTIVATIONS = (
    "backend", "tensor", "pipeline", "virtual_pipeline", "recompute", "sequence_parallel",
    "compile", "expert",
)  # fmt: skip
"""The other fields of a layout that count: a search over the rest adds up the layers once."""
_fields = attrgetter(*_OF_ACTIVATIONS)


@lru_cache(maxsize=1 << 14)
def _mean_of_pattern(
    shape: Shape, assumed: Assumptions, stage: int, sharded: bool, fields: tuple[Any, ...]
) -> float:
    values = dict(zip(_OF_ACTIVATIONS, fields, strict=True))
    layout = Layout(sharding="full" if sharded else "none", **values)
    kinds = kinds_of_stages(shape, layout)[stage]
    every = sum(
        count * layer_activations(kind, layout, assumed) * kind.seq_len / shape.seq_len
        for kind, count in kinds.items()
    )
    return every / sum(kinds.values())


def largest_layer(rank: StageRank) -> float:
    """Return `layer_activations` without recomputation of the stage's kind of layer that keeps the
    most, for each token of the model's sequence."""
    return max(
        layer_activations(kind, rank.layout, rank.assumed, "none")
        * (kind.seq_len / rank.shape.seq_len)
        for kind in rank.kinds
    )


def _summed(terms: Callable[_P, Iterator[float]]) -> Callable[_P, float]:
    def total(*given: _P.args, **named: _P.kwargs) -> float:
        return sum(terms(*given, **named))

    return total


@lru_cache(maxsize=4096)
@_summed
def _saved(
    shape: Shape,
    t: int,
    split: int,
    recompute: Recompute,
    flash_attention: bool,
    torch: bool,
    drops: bool,
    fused_gate: bool,
    narrow: float,
    compiled: bool,
    exchanges: bool,
) -> Iterator[float]:
    """The terms, in bytes for 16-bit activations, with ``t`` tensor ranks, over ``split`` of which
    the sequence is split. ``drops``: see `Assumptions.recomputes_modules`. ``narrow``: bytes of an
    element of a product's input. ``exchanges``: whether torchtitan's selective recompute keeps the
    tokens that ranks with experts exchange."""
    h = shape.hidden
    if recompute == "full":
        yield 2 * residual(shape) / split
        return
    if not (shape.heads or shape.ffn_hidden):
        yield from (part.kept(h, t, split) for part in shape.parts)
        return
    yield 2 * h / split
    queries = shape.heads * shape.head_size
    values = shape.heads * (shape.value_head_size or shape.head_size)
    # Tensor parallelism copies key heads if there are fewer of them than ranks.
    keys = max(shape.kv_heads, min(t, shape.heads)) * shape.head_size
    grouped = keys if shape.value_head_size == 0 else values
    width = shape.ffn_hidden
    partial = recompute == "selective" and torch and not drops
    if shape.experts:
        # torchtitan's policy does not keep the outputs of grouped products.
        width *= shape.shared_experts + (0 if partial else shape.experts_per_token)
    if shape.experts and (exchanges or not partial):
        # The tokens sent to experts. Megatron-Core multiplies the router's weights with the inner
        # activations (``weighted_bias_swiglu_impl``), others with the outputs, and so keep them.
        routed = shape.expert_width * shape.experts_per_token
        yield (narrow + (2 if torch else 0)) * routed / split
    if partial:
        # torchtitan's policy: keep attention's and every second product's output, recompute the
        # rest. Nothing reads the last output of a dense layer again: a compiler does not keep it.
        yield 0 if compiled else 2 * h / split
        yield 2 * (queries + grouped + values + width) / t
        yield from (part.kept(h, t, split) for part in shape.parts)
        return
    # Inputs of both norms (one yielded above) and their outputs, the products' inputs. Megatron-LM
    # keeps a rank's part of these and gathers them again (RAR, section 4.2.2); PyTorch's DTensor
    # and nanotron keep what the product read.
    norms = 1 if shape.parallel else bool(shape.heads) + bool(shape.ffn_hidden)
    outputs = 0 if drops else narrow * norms * h
    yield 2 * (norms - 1) * h / split + outputs / (1 if torch else split)
    if shape.dropout:
        yield 2 * h / split
    if shape.kv_rank:
        keys = queries
        yield 2 * (shape.query_rank + shape.kv_rank + shape.rope_head_size)
    yield 2 * (values if drops and shape.kv_rank else queries + keys + grouped + values) / t
    if shape.qk_norm:
        # The norms keep their inputs, attention what it reads.
        yield 2 * (queries + keys) / t
    if narrow < 2:
        # Attention keeps its output in 16 bits, and the product after it a narrow copy.
        yield narrow * values / t
    if not flash_attention and recompute != "selective":
        yield _scores(shape, t, torch)
    # A fused SwiGLU recomputes its output.
    matrices = (3 if fused_gate else 4) if shape.gated else 2
    if shape.lora is not None and not shape.lora.adapts_mlp:
        # A frozen product needs no input for its backward pass.
        matrices -= 1
        yield -narrow * h / split
    yield (2 * (matrices - 1) + narrow) * width / t
    if drops and (shape.experts or not shape.kv_rank):
        # Of a dense layer with MLA, only the norms and the up projections are recomputed.
        yield -narrow * shape.ffn_hidden * max(1, shape.experts_per_token) / t
    if shape.lora is not None:
        # The inner tensors of the adapters: four in attention, one for each matrix of the MLP.
        inner = 4 + (shape.matrices if shape.lora.adapts_mlp else 0)
        yield 2 * inner * shape.lora.rank
        if shape.lora.dropout:
            # Instead of their inputs: a copy in 16 bits and a mask for each adapted matrix.
            yield 3 * shape.lora.dropout * h / split
            if shape.lora.output_dropout:
                yield 3 * values / t
            yield -narrow * h / split
            if shape.lora.adapts_mlp:
                yield 3 * ((shape.matrices - 1) * h / split + width / t)
                yield -narrow * (h / split + width / t)
    yield from (part.kept(h, t, split) for part in shape.parts)
