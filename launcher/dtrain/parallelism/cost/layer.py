"""The time of one layer on one GPU: matrix products, attention, and memory traffic."""

from __future__ import annotations

import math
from collections.abc import Iterator
from operator import attrgetter

from dtrain.parallelism.assumptions import COMPILED_LOSS
from dtrain.parallelism.cluster.hardware import Precision
from dtrain.parallelism.cost.keyed import KeyedCosts
from dtrain.parallelism.cost.products import (
    Product,
    grouped,
    products,
    tokens,
    up_projections,
)
from dtrain.parallelism.model.shape import Shape
from dtrain.records import cached_property
from dtrain.runtime.layout import Layout

BYTES = {"bf16": 2, "fp16": 2, "fp8": 2, "nvfp4": 2, "tf32": 4, "fp32": 4}
"""Bytes of one activation. In fp8 and nvfp4 are only copies of the inputs of matrix products."""


SEPARATE_NORMS = 32.0
"""Passes over n·h elements of 16 bits of both RMS norms beyond those of fused kernels, if each of
their operations is a kernel, in 32 bits: 18 for each norm instead of 2."""
SEPARATE_ROTATION = 8.0
"""Such passes of the rotation of queries and keys: 10 passes instead of 2."""
SEPARATE_SCORES = 6.0
"""Passes of the score matrix through memory beyond those of fused kernels, if its scale, its mask
and its softmax in 32 bits are kernels of their own (Hugging Face's ``eager`` attention)."""
EXPONENTIALS = 3.9e12
"""Exponentials of a GPU in a second (H100, arXiv 2407.08608). Newer GPUs have hardly more."""
SCAN = 0.19
"""FLOP/s of a scan in chunks as a share of FlashAttention-2's. At 2,048 tokens, Mamba-2's kernel is
as fast as causal FlashAttention-2 of the same width (arXiv 2405.21060, section 9.3, figure 10, with
64 states), which computes 2·2048 FLOPs for each element; the scan 2·256 + 4·64."""
SCAN_BACKWARD = 3.0
"""Time of a part's backward pass, relative to its forward pass: twice the FLOPs, and the forward
pass again, whose inner tensors the fused kernels do not keep."""
LOSS = 48.0
"""Bytes that cross-entropy reads and writes for each logit. PyTorch casts it to 32 bits (6), and
reads it three times for the log-softmax (16: ``cunn_SoftMaxForward`` in ``SoftMax.cu``). It fills a
gradient with zeros (4), which ``cunn_SoftMaxBackward`` reads twice, and the log-softmax once (16),
and casts the result back (6). Megatron-LM's ``cross_entropy.py`` comes to 52."""
FUSED_LOSS = 6.0
"""Bytes for each logit in one kernel for each pass, in 16 bits, beside the output layer's products:
it reads logits for the loss, and again to replace them with their gradient."""
REPEATED_LOSS = 28.0
"""Bytes for each logit of two metrics of the loss: each casts the logits, and writes and reads the
logarithms of their softmax."""
EXPANSION = 24.0
"""Bytes that pass through memory for each parameter of 4 bits, if a kernel for each operation
expands it: shift, mask, a gather each of scales and zeros, difference and product (AutoGPTQ,
``qlinear_cuda_old.py``)."""
UNALIGNED = 1 / 16
"""Speed of 16-bit products without Tensor Cores, as a share: an A100's 19.5 of 312 TFLOP/s."""


class Kernels(KeyedCosts):
    """Computes seconds of one layer and micro-batch on one GPU, by pass and part. They are the same
    for layouts that differ only in their stages or data ranks."""

    layout_fields = attrgetter(
        "backend", "tensor", "context", "expert", "micro_batch", "recompute", "sequence_parallel",
        "shards_parameters",
    )  # fmt: skip

    @property
    def tokens(self) -> float:
        return tokens(self.shape, self.layout)

    def adapters(self, *, moe: bool) -> float:
        """Seconds of the adapters in the forward pass: thin products, and a sum with the output of
        each adapted matrix. Memory bounds usual ranks, and FLOP those of hundreds."""
        shape, lora = self.shape, self.shape.lora
        if lora is None:
            return 0.0
        n, t = self.tokens, self.layout.tensor
        # Each adapter's inner and outer width together, over the tokens that pass through it.
        sides = shape.adapter_parameters(moe=moe, active=True) / lora.rank / t
        busy = self._peak(self._wide) * self.efficiency.gemm_share(self._wide)
        moved = self._memory(3 * BYTES[self.assumed.precision] * n * sides)
        return max(moved, 2 * n * sides * lora.rank / busy)

    def expansion(self, *, moe: bool) -> float:
        """Seconds to expand matrices of 4 bits to 16 in memory, which each pass does again."""
        shape = self.shape
        if shape.lora is None or not shape.lora.expands:
            return 0.0
        apart = self.assumed.separate_expansion
        each = EXPANSION if apart else shape.frozen_matrix_bytes + 2
        return self._memory(each * _held(shape, self.layout, moe=moe))

    def _peak(self, precision: Precision) -> float:
        """FLOP/s of products, at the clock that the GPU's power limit allows."""
        gpu = self.cluster.gpu
        return gpu.peak(precision) * 1e12 * gpu.sustained

    @property
    def _wide(self) -> Precision:
        """The output layer's and attention's precision: fp8 and nvfp4 are too coarse for them."""
        narrow = self.assumed.precision in ("fp8", "nvfp4")
        return "bf16" if narrow else self.assumed.precision

    def product_seconds(self, product: Product, *, wide: bool = False) -> float:
        """Return a product's time, bound by FLOP if it is large, by memory reads if it is thin."""
        efficiency, gpu = self.efficiency, self.cluster.gpu
        precision = self._wide if wide else self.assumed.precision
        one = product.flop / product.count
        # A faster unit needs a larger product to reach its peak.
        half = efficiency.gemm_half * gpu.peak(precision) / 312
        best = efficiency.gemm_share(precision)
        busy = (one + half) / (self._peak(precision) * best)
        moved = BYTES[precision] * (
            product.m * product.k + product.k * product.n + product.m * product.n
        )
        return product.count * max(busy, moved / (gpu.bandwidth * 1e9 * efficiency.stream))

    def _products(self, *, moe: bool) -> Iterator[Product]:
        yield from products(self.shape, self.layout, moe=moe)
        if moe and self.shape.ffn_hidden:
            yield from self.grouped()

    def grouped(self) -> Iterator[Product]:
        """The products of the rank whose routed experts have the most tokens."""
        whole = self.assumed.spreads_experts(self.shape, self.layout)
        yield from grouped(self.shape, self.layout, copies=self._copies, whole=whole)
        if self.assumed.masks_experts:
            width = self.shape.expert_width
            yield Product(self.tokens * self._copies, self.shape.seq_len, width, 2)

    @cached_property
    def _copies(self) -> float:
        """Experts for each token, on the rank that has the most."""
        return self.shape.experts_per_token * self.assumed.busiest(self.shape, self.layout)

    def weights_forward(self, *, moe: bool) -> float:
        return self._moe_weights if moe else self._dense_weights

    def accumulation(self, weights: float) -> float:
        """Seconds to add the gradients of ``weights`` parameters to their sum, in each micro-batch.

        The time depends on the parameters, not on the tokens, so it weighs most with few tokens.
        """
        if self.shape.lora is not None:
            return 0.0
        return self._memory(weights * self.assumed.gradient_traffic(self.layout))

    def _memory(self, size: float) -> float:
        """Seconds to read or write ``size`` bytes of the GPU's memory."""
        return size / (self.cluster.gpu.bandwidth * 1e9 * self.efficiency.stream)

    @cached_property
    def _moe_weights(self) -> float:
        return sum(self.product_seconds(product) for product in self._products(moe=True))

    @cached_property
    def _dense_weights(self) -> float:
        return sum(self.product_seconds(product) for product in self._products(moe=False))

    def attention_flop(self) -> float:
        """FLOP of one forward pass without the causal mask: 4·n·s·heads·head_size / t."""
        shape, packed = self.shape, self.assumed.document
        part = self.efficiency.head_multiple if self.assumed.flash_attention else 1.0
        sizes = shape.head_size, shape.value_head_size or shape.head_size
        width = shape.heads * sum(part * math.ceil(size / part) for size in sizes)
        seen = shape.seq_len
        if packed and self.assumed.flash_attention:
            seen = min(seen, packed)
        every = 2.0 * self.tokens * seen * width / self.layout.tensor
        return every * shape.attended_share

    @cached_property
    def attention_forward(self) -> float:
        """Seconds of attention. Flash attention runs at its share of the peak and skips the half of
        the scores that a causal mask hides. Otherwise: two batched products, and the softmax's
        passes over the score matrix."""
        efficiency, gpu, layout = self.efficiency, self.cluster.gpu, self.layout
        peak = self._peak(self._wide)
        flop = self.attention_flop()
        if self.assumed.flash_attention:
            own = efficiency.flash2 if self.assumed.old_attention(layout) else 1.0
            own = min(own, self.assumed.early_attention)
            flop *= self._softmax_share(own) / (2 if self.shape.causal else 1)
            return flop / (peak * efficiency.attention * own)
        scores = 2.0 * self.tokens * self.shape.seq_len * self.shape.heads / layout.tensor
        passes = efficiency.scores + SEPARATE_SCORES * self.assumed.separate_kernels
        square = passes * scores / (gpu.bandwidth * 1e9 * efficiency.stream)
        # Without flash attention's padding, Tensor Cores skip such products.
        aligned = 1.0 if self.shape.head_size % 8 == 0 else UNALIGNED
        return flop / (peak * efficiency.gemm * aligned) + square

    def _softmax_share(self, own: float) -> float:
        """Time of flash attention's softmax and products, relative to heads of 128 elements.

        Each score takes one exponential, whatever the head's size: on H100s half as long as its
        products with heads of 128 (FlashAttention-3, arXiv 2407.08608, section 3.2). Older kernels
        have slower products, ``own`` of that speed, so small heads cost them less.
        """
        width = (self.shape.head_size + (self.shape.value_head_size or self.shape.head_size)) / 2
        exponential = own * self._peak(self._wide) / 4 / EXPONENTIALS
        return (1 + exponential / width) / (1 + exponential / 128)

    @cached_property
    def stream_forward(self) -> float:
        """Seconds of norms, residuals, activations and rotations, bound by memory bandwidth.

        Counts passes over n·h elements that tensor parallelism does not split (unless it splits
        the sequence), and passes over elements that it splits.
        """
        shape, layout = self.shape, self.layout
        # Norms and sums with the residual stream: three and two passes, one more for two outputs.
        whole = 5.0 * shape.sums + (1.0 if shape.parallel else 0.0)
        if shape.dropout:
            whole += 4.0 if shape.parallel else 2.0 * shape.sums
        whole *= shape.hidden
        if shape.experts:
            # Copies of tokens are written in the order of experts, and later added to each other.
            whole += 2.0 * (1 + self._copies) * shape.expert_width
        # Tensors with room for more copies are filled with zeros, and sorted twice in whole.
        empty = self.assumed.empty(shape, layout)
        whole += 5.0 * empty * shape.expert_width
        if layout.sequence_parallel:
            whole /= layout.tensor
        f = shape.ffn_hidden * (max(1, self._copies) + empty if shape.experts else 1)
        split = (6.0 * shape.heads * shape.head_size + (5.0 if shape.gated else 4.0) * f) / (
            layout.tensor
        )
        return self._stream(whole + split) + self._separate_kernels()

    def _separate_kernels(self) -> float:
        """Seconds that norms and rotations take longer as a kernel for each operation."""
        shape, layout = self.shape, self.layout
        if not (self.assumed.separate_kernels and shape.gated):
            return 0.0
        norms = SEPARATE_NORMS * shape.hidden / (layout.tensor if layout.sequence_parallel else 1)
        turned = (shape.heads + shape.kv_heads) * shape.head_size / layout.tensor
        return self._memory(BYTES["bf16"] * self.tokens * (norms + SEPARATE_ROTATION * turned))

    def _stream(self, elements: float) -> float:
        """Seconds to read or write ``elements`` of each token."""
        return self._memory(BYTES[self.assumed.precision] * self.tokens * elements)

    def forward(self, *, moe: bool) -> float:
        return (
            self.weights_forward(moe=moe)
            + self.adapters(moe=moe)
            + self.expansion(moe=moe)
            + self.attention_forward
            + self.stream_forward
            + self.parts_forward
        )

    @cached_property
    def parts_forward(self) -> float:
        """Seconds of the layer's parts beside their products: their scans and their attention, and
        the kernels that read and write what these need."""
        shape, layout, efficiency = self.shape, self.layout, self.efficiency
        seconds = 0.0
        for part in shape.parts:
            speed = self._peak(self._wide) * efficiency.attention
            if not part.attends:
                speed *= efficiency.flash2 * SCAN
            elif self.assumed.old_attention(layout):
                speed *= efficiency.flash2
            seconds += self.tokens * part.kernel_flop / layout.tensor / speed
            seconds += self._stream(part.split_passes(shape.hidden) / layout.tensor)
        return seconds

    def backward(self, *, moe: bool) -> float:
        """Two products for each forward product, or one if its matrix is frozen; attention runs at
        a lower share of the peak."""
        shape = self.shape
        attention = self.attention_forward
        attention *= 2.5 / 0.85 if self.assumed.flash_attention else 2.0
        weights = self._products_backward * self.weights_forward(moe=moe)
        held = sum(one.weights for one in self._products(moe=moe))
        if shape.parts:
            idle = sum(part.idle_parameters(shape.hidden) for part in shape.parts)
            held += idle / self.layout.tensor
        weights += self.accumulation(held)
        streams = 2 * self.stream_forward + SCAN_BACKWARD * self.parts_forward
        adapters = 2 * self.adapters(moe=moe) + self.expansion(moe=moe)
        return weights + adapters + attention + streams

    @property
    def _products_backward(self) -> float:
        """Products of the backward pass for each one of the forward pass."""
        return 2.0 if self.shape.lora is None else 1.0

    def recompute(self, *, moe: bool) -> float:
        """Seconds of recomputation in the backward pass."""
        match self.layout.recompute:
            case "full":
                return self.forward(moe=moe)
            case "selective" if self.assumed.recomputes_modules(self.shape, self.layout):
                return self._recompute_modules(moe=moe)
            case "selective" if self.assumed.by_torch(self.layout):
                return _recompute_half(self, moe=moe)
            case "selective":
                return self.attention_forward
            case _:
                return 0.0

    def _recompute_modules(self, *, moe: bool) -> float:
        """Seconds of both norms, of the MLP's or the experts' activation, and of MLA's up
        projections: of what `layer_activations` leaves out."""
        shape, layout = self.shape, self.layout
        norms = 4.0 * shape.hidden / (layout.tensor if layout.sequence_parallel else 1)
        copies = self._copies if moe else 0.0 if shape.experts or shape.kv_rank else 1.0
        inner = (3.0 if shape.gated else 2.0) * shape.ffn_hidden * copies
        seconds = self._stream(norms + inner / layout.tensor)
        if shape.kv_rank:
            again = up_projections(shape, layout)
            seconds += sum(self.product_seconds(product) for product in again)
        return seconds

    def head_forward(self) -> float:
        """Logits, and their cross-entropy and its gradient."""
        return self._head_product + self._head_stream

    def head_backward(self) -> float:
        summed = self.accumulation(self.shape.head_parameters / self.layout.tensor)
        return self._products_backward * self._head_product + summed

    @property
    def _predicted(self) -> float:
        """Tokens of the output layer in one micro-batch."""
        if not self.shape.target_len:
            return self.tokens
        return self.shape.target_len * self.layout.micro_batch / self.layout.context

    @property
    def _head_product(self) -> float:
        vocab = self.shape.vocab / self.layout.tensor
        product = Product(self._predicted, self.shape.hidden, vocab)
        return self.product_seconds(product, wide=True)

    @property
    def _head_stream(self) -> float:
        """Seconds of the loss in both passes, bound by memory bandwidth."""
        assumed = self.assumed
        among = 1 if assumed.habits.gathers_logits else self.layout.tensor
        passes = FUSED_LOSS if assumed.fused_loss or assumed.loss_bytes == COMPILED_LOSS else LOSS
        if assumed.repeats_loss:
            passes += REPEATED_LOSS
        return self._memory(passes * self._predicted * self.shape.vocab / among)


def _recompute_half(kernels: Kernels, *, moe: bool) -> float:
    """Seconds of torchtitan's policy, which keeps the outputs of attention and of every second
    product: keys, attention's output and the MLP's second input are computed again, and all of the
    routed experts' products."""
    shape, t, n, h = kernels.shape, kernels.layout.tensor, kernels.tokens, kernels.shape.hidden
    if moe or shape.kv_rank or not (shape.heads and shape.ffn_hidden):
        weights = 0.5 * kernels.weights_forward(moe=moe)
        if moe and shape.ffn_hidden:
            routed = kernels.grouped()
            weights += 0.5 * sum(kernels.product_seconds(product) for product in routed)
    else:
        keys = max(shape.kv_heads / t, 1) * shape.head_size
        values = shape.heads * (shape.value_head_size or shape.head_size)
        again = [Product(n, h, keys), Product(n, values / t, h)]
        if shape.gated:
            dense = (shape.dense_ffn_hidden if shape.experts else 0) or shape.ffn_hidden
            again.append(Product(n, h, dense / t))
        weights = sum(kernels.product_seconds(product) for product in again)
    adapters = 0.5 * (kernels.adapters(moe=moe) + kernels.expansion(moe=moe))
    return weights + adapters + kernels.stream_forward


def _held(shape: Shape, layout: Layout, *, moe: bool) -> float:
    """Return the parameters of a layer on one GPU."""
    held = shape.layer_parameters(moe=moe) / layout.tensor
    if moe:
        every = shape.experts * shape.expert_parameters / layout.tensor
        held -= every * (1 - 1 / layout.expert)
    return held
