"""The planner's assumptions about the software that trains a layout."""

from __future__ import annotations

from dataclasses import dataclass

from dtrain.parallelism.backends import backend_of
from dtrain.parallelism.cluster.hardware import Precision
from dtrain.runtime.layout import Layout


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
    def usual(cls, precision: Precision) -> Assumptions:
        return cls(precision, fp32_gradients=precision != "fp16")

    def by_torch(self, layout: Layout) -> bool:
        """Whether PyTorch's own modules run, without Megatron-LM's fused kernels."""
        return layout.shards_parameters or backend_of(layout).torch_kernels
