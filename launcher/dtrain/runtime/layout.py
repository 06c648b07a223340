"""What a cluster file says about the model: ``job.layout`` and ``job.training``.

A launch passes both to every worker, as JSON in ``DTRAIN_LAYOUT`` and ``DTRAIN_TRAINING``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layout:
    """How a model is split. The product of the parallel sizes is the world size."""

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    """Stages on each pipeline rank."""
    schedule: str = "1f1b"
    """Order of a pipeline's micro-batches: ``gpipe``, ``1f1b`` (interleaved, where
    ``virtual_pipeline`` is more than 1), ``zb-1p`` or ``zb-v``."""
    context: int = 1
    expert: int = 1
    data: int = 1
    sharding: str = "none"
    """``none``, ``optimizer``, ``gradients``, ``full`` or ``hybrid``."""
    shard: int | None = None
    """Data ranks in one group of ``hybrid`` sharding. ``None`` means those of one host."""
    micro_batch: int = 1
    """Sequences that one data rank puts through the model at a time."""
    grad_accumulation: int = 1
    """Micro-batches of one data rank in one optimizer step."""
    recompute: str = "none"
    """``none``, ``selective`` or ``full``."""
    sequence_parallel: bool = False
    offload: bool = False
    """Whether optimizer states live in the hosts' memory."""

    @property
    def world_size(self) -> int:
        """Ranks that the layout is for."""
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def global_batch(self) -> int:
        """Sequences in one optimizer step, over all ranks."""
        return self.data * self.micro_batch * self.grad_accumulation


@dataclass(frozen=True, slots=True)
class Training:
    global_batch: int | None = None
    """Sequences (or images) in one optimizer step, over all ranks."""
    precision: str | None = None
    """``bf16``, ``fp16``, ``fp8`` or ``fp32``."""
    seq_len: int | None = None
