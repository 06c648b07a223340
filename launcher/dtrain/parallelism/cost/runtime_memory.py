"""Sizes of what one rank holds under ``dtrain.runtime``, in bytes or elements.

They are those of PyTorch's autograd, DTensor and FSDP2 as the runtime drives them, measured with
``scripts/planner/track_memory.py``. In 16 bits, FSDP2 keeps the weights in 32 bits and gathers them
in 16, with one shard per layer and one for each part around the layers. DDP and a single GPU
compute under autocast. `runtime_phases` finds the moment with the most memory in use.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from dtrain.parallelism.assumptions import Assumptions
from dtrain.parallelism.cost.layer import BYTES
from dtrain.parallelism.cost.stages import parameters_of_stage
from dtrain.parallelism.model.shape import Shape
from dtrain.runtime.layout import Layout


@dataclass(frozen=True)
class Stage:
    """One rank of a pipeline stage; without a pipeline, of the only stage."""

    shape: Shape
    layout: Layout
    assumed: Assumptions
    stage: int
    layers: int
    held: float
    """Micro-batches in flight."""

    @property
    def first(self) -> bool:
        return self.stage == 0

    @property
    def last(self) -> bool:
        return self.stage == self.layout.pipeline - 1

    @property
    def compute(self) -> int:
        """Bytes of an element in computation."""
        return BYTES[self.assumed.precision]

    @property
    def autocast(self) -> bool:
        """Whether autocast, not FSDP, casts: true if nothing is sharded or split."""
        layout = self.layout
        whole = layout.tensor == layout.pipeline == layout.expert == 1
        copied = layout.sharding == "none" and not layout.offload and layout.reduce == "fp32"
        return whole and copied and self.compute == 2

    @property
    def reduced(self) -> int:
        """Bytes of a gradient's element in the reduction, and while it waits for it."""
        return 2 if self.layout.reduce == "bf16" else 4

    @property
    def tokens(self) -> float:
        return self.shape.seq_len * self.layout.micro_batch / self.layout.context

    @property
    def stream(self) -> float:
        """Elements of the residual stream for each token."""
        return self.shape.hidden / (self.layout.tensor if self.layout.sequence_parallel else 1)

    @cached_property
    def parameters(self) -> float:
        """On this rank before they are sharded."""
        return sum(parameters_of_stage(self.shape, self.layout, self.layers, self.stage))

    @cached_property
    def parameter_shard(self) -> float:
        """Parameters on this rank. Ranks with the same experts share the states of these only."""
        dense, experts = parameters_of_stage(self.shape, self.layout, self.layers, self.stage)
        shards = self.layout.shards
        return dense / shards + experts / max(1, shards // self.layout.expert)

    @property
    def weights(self) -> float:
        """Bytes of the 32-bit parameters; offloaded ones are in the host's memory."""
        return 0.0 if self.layout.offload else 4 * self.parameter_shard

    @property
    def moments(self) -> float:
        """Bytes of Adam's moments."""
        return 2 * self.weights

    @property
    def layer(self) -> float:
        """Parameters of one layer; of a mixture, a layer with this rank's experts."""
        shape, layout = self.shape, self.layout
        elsewhere = shape.experts * shape.expert_parameters * (1 - 1 / layout.expert)
        return (shape.layer_parameters() - elsewhere) / layout.tensor

    @property
    def bank(self) -> float:
        """Parameters of the experts in one layer, if several ranks spread them."""
        shape, layout = self.shape, self.layout
        if layout.expert == 1:
            return 0.0
        return shape.experts * shape.expert_parameters / layout.expert / layout.tensor

    @property
    def attention_parameters(self) -> float:
        """Of one layer."""
        return self.shape.attention_parameters / self.layout.tensor

    @property
    def experts_here(self) -> int:
        """Experts on this rank; 1 for an MLP."""
        return max(1, self.shape.experts // self.layout.expert)

    @property
    def width(self) -> float:
        """Inner width of an MLP for each token; of experts, which compute one after the other, of
        one of them."""
        return self.shape.ffn_hidden * self.used_experts / self.experts_here / self.layout.tensor

    @property
    def matrix(self) -> float:
        """Parameters of one matrix of an MLP."""
        return self.shape.hidden * self.shape.ffn_hidden / self.layout.tensor

    @property
    def head(self) -> float:
        return self.shape.head_parameters / self.layout.tensor if self.last else 0.0

    @property
    def embedding(self) -> float:
        return self.shape.embedding_parameters / self.layout.tensor if self.first else 0.0

    @property
    def embedding_gradient(self) -> float:
        """Elements. DTensor computes the gradient of the whole vocabulary on each tensor rank, and
        sums and splits it only in the reduction."""
        return self.embedding * self.layout.tensor

    @property
    def kept(self) -> float:
        """Bytes of the GPU that one layer keeps for the backward pass of one micro-batch."""
        if self.layout.offload_activations and self.layout.tensor == 1:
            return 0.0
        return self.saved(self.layout.recompute)

    def saved(self, recompute: str) -> float:
        """Return the bytes that one layer saves for the backward pass of one micro-batch."""
        shape, t, c = self.shape, self.layout.tensor, self.compute
        if recompute == "full":
            return c * self.stream * self.tokens
        if recompute == "selective":
            # The outputs of attention and of every second product: queries, values, the MLP's
            # gate, and its end before tensor ranks add it up.
            queries, _, grouped, values = self._widths
            width = shape.ffn_hidden * self.used_experts
            each = self.stream + (queries + grouped + values + width) / t + shape.hidden
            return (c * each + 4 * shape.heads / t) * self.tokens
        # The inputs of both norms, and the products' inputs, which tensor ranks gather whole.
        inputs = 2 * c * self.stream + 2 * c * shape.hidden
        if self.autocast:
            # The stream and the norms are in 32 bits, and each product casts its own input.
            inputs = 2 * 4 * self.stream + (3 + (2 if shape.gated else 1)) * c * shape.hidden
        if shape.dropout:
            inputs += 2 * shape.hidden
        statistics = 4 * (shape.heads / t + 2 * self.stream / shape.hidden)
        tables = 8 * shape.seq_len / self.layout.context * shape.head_size if shape.gated else 0
        return (inputs + statistics) * self.tokens + self.attention + self.mlp + tables

    @property
    def attention(self) -> float:
        """Bytes that one layer saves of queries, keys, values and attention's output."""
        shape, t, c, context = self.shape, self.layout.tensor, self.compute, self.layout.context
        queries, keys, grouped, values = self._widths
        each = c * (queries + keys + grouped + values) / t
        if context > 1:
            # Keys and values of the whole sequence, and a copy that joins the two outputs.
            each += c * ((context - 1) * (keys + grouped) + values) / t
        if shape.kv_rank:
            each += c * (queries - keys) / t
            each += c * (shape.query_rank + shape.kv_rank + shape.rope_head_size)
        return each * self.tokens

    @property
    def routed(self) -> float:
        """Bytes of one layer's tokens, once for each expert that they are sent to."""
        shape = self.shape
        return self.compute * shape.hidden * shape.experts_per_token * self.tokens

    @property
    def mlp(self) -> float:
        """Bytes that one layer saves of what its MLP or its experts multiply."""
        shape, c = self.shape, self.compute
        width = shape.ffn_hidden * self.used_experts / self.layout.tensor
        # The tokens sent to experts, and the experts' outputs.
        return c * (4 if shape.gated else 2) * width * self.tokens + 2 * self.routed

    @property
    def _widths(self) -> tuple[int, int, int, int]:
        """Queries, keys, values of the key heads, and values of all heads, for each token."""
        shape = self.shape
        values = shape.heads * (shape.value_head_size or shape.head_size)
        keys = shape.kv_heads * shape.head_size
        grouped = values if shape.value_head_size else keys
        return shape.heads * shape.head_size, keys, grouped, values

    @property
    def used_experts(self) -> int:
        """Experts for each token; 1 for an MLP."""
        shape = self.shape
        return shape.experts_per_token + shape.shared_experts if shape.experts else 1

    @property
    def ends(self) -> float:
        """Of one micro-batch, the inputs of the last norm and of the output layer."""
        return self.compute * (self.stream + self.shape.hidden) * self.tokens if self.last else 0.0

    @property
    def logits(self) -> float:
        """Elements of the logits."""
        return self.tokens * self.shape.vocab / self.layout.tensor if self.last else 0.0

    @property
    def buffers(self) -> float:
        """Bytes of a pipeline's receive buffers: one for activations and one for gradients, for
        every micro-batch of a step."""
        directions = (not self.first) + (not self.last)
        received = directions * self.layout.virtual_pipeline if self.layout.pipeline > 1 else 0
        if self.layout.virtual_pipeline > 1:
            received = 2 * self.layout.virtual_pipeline - (self.first + self.last)
        each = self.compute * self.stream * self.tokens
        return received * self.layout.grad_accumulation * each
