"""How a model is split over GPUs, and what a split must satisfy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dtrain.parallelism.cluster.hardware import Precision

Sharding = Literal["none", "optimizer", "gradients", "full", "hybrid"]
Schedule = Literal["1f1b", "zb-1p", "zb-2p", "zb-v"]
"""1F1B, interleaved where ``virtual_pipeline`` is over 1, and zero-bubble variants of it."""
Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True, slots=True)
class Layout:
    """One way of splitting. ``world_size`` GPUs take part.

    ``expert`` GPUs are taken from the data (and context) ranks, so that they do not count in the
    world size. ``hybrid`` sharding shards over ``shard`` of the data ranks and replicates over
    the others; ``full`` shards over all of them.
    """

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    """Pieces of layers that each stage holds in an interleaved schedule."""
    schedule: Schedule = "1f1b"
    context: int = 1
    expert: int = 1
    data: int = 1
    sharding: Sharding = "none"
    shard: int = 0
    """Data ranks that states are spread over, where that is not all of them; else 0."""
    micro_batch: int = 1
    """Sequences in one forward pass."""
    grad_accumulation: int = 1
    """Micro-batches of one replica in one optimizer step."""
    recompute: Recompute = "none"
    sequence_parallel: bool = False
    offload: bool = False
    """Whether optimizer states live in the host's memory."""
    precision: Precision = "bf16"
    flash_attention: bool = True
    fused_loss: bool = False
    """Whether cross-entropy overwrites the logits with their gradient in 16 bits, as
    flash-attn's kernel does; PyTorch's own works on copies in 32."""
    fp32_gradients: bool = True
    """Whether 16-bit gradients are accumulated in 32 bits (Megatron-LM with bf16)."""

    @property
    def by_torch(self) -> bool:
        """Whether parameters are sharded, which is PyTorch's own modules under FSDP: their
        kernels are not fused as Megatron-LM's are."""
        return self.sharding in ("full", "hybrid")

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def global_batch(self) -> int:
        """Sequences in one optimizer step."""
        return self.data * self.micro_batch * self.grad_accumulation
