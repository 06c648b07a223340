"""Sizes of what one rank holds under ``dtrain.runtime``, in bytes or elements.

They are those of FSDP2 and DDP as the runtime drives them, measured with
``scripts/planner/track_memory.py``. In 16 bits, FSDP2 keeps the weights in 32 bits and gathers them
in 16, with one shard per layer and one for each part around the layers. DDP and a single GPU
compute under autocast. `runtime_phases` finds the moment with the most memory in use.
"""

from __future__ import annotations

from dtrain.parallelism.cost.runtime_layer import Layer, runtime_layer
from dtrain.parallelism.cost.stages import StageRank, parameters_of_stage, receive_buffers
from dtrain.records import cached_property, dataclass


@dataclass(frozen=True)
class Stage(StageRank):
    held: float
    """Micro-batches in flight."""

    @cached_property
    def layer(self) -> Layer:
        return runtime_layer(self.shape, self.layout, self.assumed)

    @property
    def reduced(self) -> int:
        """Bytes of a gradient's element in the reduction, and while it waits for it."""
        return 2 if self.layout.reduce == "bf16" else 4

    @cached_property
    def _parameters(self) -> tuple[float, float]:
        return parameters_of_stage(self.shape, self.layout, self.layers, self.stage)

    @cached_property
    def parameters(self) -> float:
        """On this rank before they are sharded."""
        return sum(self._parameters)

    @cached_property
    def parameter_shard(self) -> float:
        """Parameters on this rank. Ranks with the same experts share the states of these only."""
        dense, experts = self._parameters
        return dense / self.layout.shards + experts / self.layout.expert_shards

    @property
    def stored(self) -> int:
        """Bytes of an element in a shard of parameters, of gradients or of one of Adam's moments,
        which are in the host's memory if they are offloaded."""
        return 0 if self.layout.offload else 4

    @property
    def weights(self) -> float:
        """Bytes of the parameters."""
        return self.stored * self.parameter_shard

    @property
    def moments(self) -> float:
        """Bytes of Adam's moments."""
        return 2 * self.weights

    @property
    def embedding_gradient(self) -> float:
        """Elements. DTensor computes the gradient of the whole vocabulary on each tensor rank, and
        sums and splits it only in the reduction."""
        return self.embedding * self.layout.tensor

    @property
    def ends(self) -> float:
        """Of one micro-batch, the inputs of the last norm and of the output layer."""
        return self.layer.around if self.last else 0.0

    @property
    def logits(self) -> float:
        """Elements of the logits."""
        return self.layer.tokens * self.shape.vocab / self.layout.tensor if self.last else 0.0

    @property
    def buffers(self) -> float:
        """Bytes of a pipeline's receive buffers."""
        layer = self.layer
        each = layer.compute * layer.stream * layer.tokens
        return receive_buffers(self.layout, self.stage) * each
