"""Speed derived from the step time: tokens per second, and shares of the hardware's peak."""

from __future__ import annotations

from dtrain.parallelism.assumptions import Assumptions
from dtrain.parallelism.cluster.hardware import GpuCluster
from dtrain.parallelism.model.flop import attention_flop, products_flop
from dtrain.parallelism.model.shape import Shape
from dtrain.records import dataclass
from dtrain.runtime.layout import Layout


@dataclass(frozen=True, slots=True)
class Speed:
    """Shares are of the vendor's dense peak for the layout's precision, from 0 to 1."""

    tokens_per_s_per_gpu: float
    model_tflops_per_gpu: float
    """Model TFLOP/s without recomputation, with non-causal attention (as in ``mfu``)."""
    mfu: float
    """Model FLOPs utilization with non-causal attention, as MosaicML and torchtitan count."""
    mfu_causal: float
    """MFU with causal attention (half of the FLOPs), as Megatron-LM counts now."""
    hfu: float
    """Hardware FLOPs utilization: with recomputation, with non-causal attention."""
    hfu_causal: float
    """HFU with causal attention: what flash attention computes."""


def flop_per_token(shape: Shape, *, causal: bool = False) -> float:
    """FLOPs of forward and backward pass: 6 for each parameter in a product, plus attention.

    6·N + 12·L·s·heads·head_size (PaLM, arXiv 2204.02311, appendix B), half of the second term
    with a causal mask. The input embedding is a lookup without FLOPs. A frozen matrix has no
    gradient of its own, so it counts 4.
    """
    forward = _forward_per_token(shape, causal=causal)
    if shape.lora is None:
        return 3.0 * forward
    trained = 2.0 * _active_adapters(shape)
    return 2.0 * forward + attention_flop(shape, causal=causal) + trained


def _forward_per_token(shape: Shape, *, causal: bool) -> float:
    if shape.every_part or shape.pattern:
        return products_flop(shape) + attention_flop(shape, causal=causal)
    products = shape.active_parameters - shape.embedding_parameters + _active_adapters(shape)
    if shape.tied:
        products += shape.head_parameters
    return 2.0 * products + attention_flop(shape, causal=causal)


def _active_adapters(shape: Shape) -> int:
    moe = shape.moe_layers * shape.adapter_parameters(moe=True, active=True)
    return moe + (shape.layers - shape.moe_layers) * shape.adapter_parameters(moe=False)


def speed(
    shape: Shape, layout: Layout, cluster: GpuCluster, assumed: Assumptions, seconds: float
) -> Speed:
    """Return the speed for steps of ``seconds`` each."""
    tokens = layout.global_batch * shape.seq_len / layout.world_size / seconds
    peak = cluster.gpu.peak(assumed.precision) * 1e12
    flop, causal = flop_per_token(shape), flop_per_token(shape, causal=True)
    again, again_causal = (
        _recomputed_per_token(shape, layout, assumed, causal=only) for only in (False, True)
    )
    return Speed(
        tokens_per_s_per_gpu=tokens,
        model_tflops_per_gpu=tokens * flop / 1e12,
        mfu=tokens * flop / peak,
        mfu_causal=tokens * causal / peak,
        hfu=tokens * (flop + again) / peak,
        hfu_causal=tokens * (causal + again_causal) / peak,
    )


def _recomputed_per_token(
    shape: Shape, layout: Layout, assumed: Assumptions, *, causal: bool
) -> float:
    again = _forward_per_token(shape, causal=causal) - 2.0 * shape.head_parameters
    if layout.recompute == "full":
        return again
    if assumed.recomputes_modules(shape, layout):
        return 0.0
    if layout.recompute == "selective" and assumed.by_torch(layout):
        return again / 2
    if layout.recompute == "selective" and not assumed.flash_attention:
        return attention_flop(shape, causal=causal)
    return 0.0
