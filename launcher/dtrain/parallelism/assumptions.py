"""The planner's assumptions about the software that trains a layout."""

from __future__ import annotations

from dataclasses import dataclass

from dtrain.parallelism.backends import BACKENDS, backend_of
from dtrain.parallelism.cluster.hardware import Gpu, Precision
from dtrain.runtime.layout import BackendName, Layout

OLD = ("volta", "turing")
"""Architectures for which there is no FlashAttention-2."""


@dataclass(frozen=True, slots=True)
class Assumptions:
    precision: Precision = "bf16"
    flash_attention: bool = True
    fused_loss: bool = False
    """Whether cross-entropy overwrites the logits with their gradient in 16 bits, as flash-attn's
    kernel does. PyTorch's own kernel uses 32-bit copies."""
    fp32_gradients: bool = True
    """Whether 16-bit gradients are accumulated in 32 bits, as in Megatron-LM with bf16."""

    @classmethod
    def usual(cls, precision: Precision, gpu: Gpu, backend: BackendName) -> Assumptions:
        """Return what ``backend`` does on a GPU. FlashAttention-2 needs an A100 or newer; on older
        GPUs, PyTorch has a kernel that keeps no score matrix either, and other software has none.
        """
        return cls(
            precision,
            flash_attention=gpu.family not in OLD or BACKENDS[backend].flash2,
            fp32_gradients=precision != "fp16",
        )

    def by_torch(self, layout: Layout) -> bool:
        """Whether PyTorch's own modules run, without Megatron-LM's fused kernels."""
        return layout.shards_parameters or backend_of(layout).torch_kernels
