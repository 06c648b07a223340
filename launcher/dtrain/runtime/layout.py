"""How a model is split over processes (``job.layout``), and ``job.training``.

The planner uses the same class, and a launch passes it to every worker as JSON in
``DTRAIN_LAYOUT``, next to ``DTRAIN_TRAINING``. Python 3.8 can read this file.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Sharding = Literal["none", "optimizer", "gradients", "full", "hybrid"]
Schedule = Literal["gpipe", "1f1b", "zb-1p", "zb-2p", "zb-v"]
Recompute = Literal["none", "selective", "full"]
Reduce = Literal["fp32", "bf16"]
BackendName = Literal["runtime", "megatron", "torchtitan"]

SCHEDULES: tuple[Schedule, ...] = ("gpipe", "1f1b", "zb-1p", "zb-v")
"""PyTorch's schedules, which a cluster file can name. ``zb-2p`` occurs only in published runs."""
SIZES = ("tensor", "pipeline", "context", "data")
"""Their product is the world size."""


@dataclass(frozen=True)
class Layout:
    """How a model is split. Some fields depend on each other: see `layout_rules`."""

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    """Stages on each pipeline rank."""
    schedule: Schedule = "1f1b"
    """Order of a pipeline's micro-batches. ``1f1b`` is interleaved if ``virtual_pipeline`` is more
    than 1; ``zb-*`` are zero-bubble variants of it."""
    context: int = 1
    expert: int = 1
    """Uses the data and context ranks: it is not a factor of the world size."""
    data: int = 1
    sharding: Sharding = "none"
    """States that the data and context ranks divide among them. Each holds a copy of the rest."""
    shard: int | None = None
    """Number of data and context ranks in one group that holds all states. ``None`` means all of
    them, or for ``hybrid`` sharding those of one host."""
    micro_batch: int = 1
    """Sequences in one forward pass of a data rank."""
    grad_accumulation: int = 1
    """Micro-batches of a data rank in one optimizer step."""
    recompute: Recompute = "none"
    sequence_parallel: bool = False
    offload: bool = False
    """Whether optimizer states live in host memory."""
    offload_activations: bool = False
    """Whether what blocks save for the backward pass waits in host memory."""
    reduce: Reduce = "fp32"
    """Number format in which ranks add up gradients."""
    compile: bool = False
    """Whether ``torch.compile`` compiles each block."""
    backend: BackendName = "runtime"
    """Software that trains the layout. `dtrain.runtime` refuses a layout for other software."""

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def global_batch(self) -> int:
        """Sequences in one optimizer step, over all ranks."""
        return self.data * self.micro_batch * self.grad_accumulation

    @property
    def copies(self) -> int:
        """Ranks that hold the same part of the model if nothing is sharded."""
        return self.data * self.context

    @property
    def shards(self) -> int:
        """Ranks that share one copy of the sharded states."""
        return 1 if self.sharding == "none" else self.shard or self.copies

    @property
    def expert_shards(self) -> int:
        """Ranks that share one copy of an expert's sharded states. Of those that share the other
        states, ``expert`` hold different experts."""
        return max(1, self.shards // self.expert)

    @property
    def shards_parameters(self) -> bool:
        return self.sharding in ("full", "hybrid")

    @property
    def round_size(self) -> int:
        """Micro-batches in one round of an interleaved schedule. The schedule needs whole
        rounds."""
        interleaved = self.virtual_pipeline > 1 or self.schedule == "zb-1p"
        return self.pipeline if interleaved else 1

    def product(self, keys: Iterable[str]) -> str:
        """``tensor 4 x data 2``."""
        return " x ".join(f"{key} {getattr(self, key)}" for key in keys)

    def split_by(self, keys: Iterable[str] = SIZES) -> list[str]:
        """The ``keys`` with a size above 1."""
        return [key for key in keys if getattr(self, key) > 1]


def layers_of_stages(layers: int, stages: int) -> tuple[int, ...]:
    """The number of layers of each pipeline stage. Extra layers go to the middle stages, then to
    the first: the first also has the embedding, and the last has the output layer."""
    each, left = divmod(layers, stages)
    middle_first = sorted(range(stages), key=lambda stage: (stage in (0, stages - 1), stage))
    favoured = middle_first[:left]
    return tuple(each + (stage in favoured) for stage in range(stages))


@dataclass(frozen=True)
class Training:
    global_batch: int | None = None
    """Sequences (or images) in one optimizer step, over all ranks."""
    precision: str | None = None
    """``bf16``, ``fp16``, ``fp8``, ``nvfp4`` or ``fp32``."""
    seq_len: int | None = None
    state_bits: int | None = None
    """32, or 16 if weights, gradients and Adam's moments have no copy in 32. ``None`` means 32."""
    overlap_experts: bool | None = None
    """Whether experts exchange tokens while others are computed. ``None`` means no."""
    cuda_graph: bool | None = None
    """Whether one CUDA graph has the whole step. ``None`` means no."""
