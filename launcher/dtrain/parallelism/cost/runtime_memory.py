"""Memory of a layout that ``dtrain.runtime`` trains: the highest of a step's phases.

Terms and phases are those of PyTorch's autograd, DTensor and FSDP2 as the runtime drives them,
measured with ``scripts/planner/track_memory.py``; all in bytes. In 16 bits, FSDP2 keeps the weights
in 32 bits and gathers them in 16, with one shard per layer and one for each part around the
layers. DDP and a single GPU compute under autocast.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from dtrain.parallelism.assumptions import Assumptions
from dtrain.parallelism.cost.layer import BYTES
from dtrain.parallelism.cost.sharded_memory import Phase
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
        return whole and layout.sharding == "none" and not layout.offload and self.compute == 2

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

    def kept(self, recompute: str) -> float:
        """Return the bytes that one layer saves for the backward pass of one micro-batch."""
        shape, t, c = self.shape, self.layout.tensor, self.compute
        context = self.layout.context
        if recompute == "full":
            return c * self.stream * self.tokens
        queries = shape.heads * shape.head_size
        values = shape.heads * (shape.value_head_size or shape.head_size)
        keys = shape.kv_heads * shape.head_size
        grouped = values if shape.value_head_size else keys
        used = shape.experts_per_token + shape.shared_experts if shape.experts else 1
        width = shape.ffn_hidden * used
        statistics = 4 * (shape.heads / t + 2 * self.stream / shape.hidden)
        if recompute == "selective":
            # The outputs of attention and of every second product: queries, values, the MLP's
            # gate, and its end before tensor ranks add it up.
            each = self.stream + (queries + grouped + values + width) / t + shape.hidden
            return (c * each + 4 * shape.heads / t) * self.tokens
        # Inputs of both norms; the products' inputs, which tensor ranks gather whole; queries,
        # keys, values and attention's output; what the MLP multiplies.
        inputs = 2 * c * self.stream + 2 * c * shape.hidden
        if self.autocast:
            # The stream and the norms are in 32 bits, and each product casts its own input.
            inputs = 2 * 4 * self.stream + (3 + (2 if shape.gated else 1)) * c * shape.hidden
        attention = c * (queries + keys + grouped + values) / t
        if context > 1:
            # Keys and values of the whole sequence, and a copy that joins the two outputs.
            attention += c * ((context - 1) * (keys + grouped) + values) / t
        if shape.kv_rank:
            attention += c * (queries - keys) / t
            attention += c * (shape.query_rank + shape.kv_rank + shape.rope_head_size)
        mlp = c * (4 if shape.gated else 2) * width / t
        if shape.experts:
            # The tokens sent to experts, and the experts' outputs.
            mlp += 2 * c * shape.hidden * shape.experts_per_token
        if shape.dropout:
            inputs += 2 * shape.hidden
        tables = 8 * shape.seq_len / context * shape.head_size if shape.gated else 0
        return (inputs + attention + mlp + statistics) * self.tokens + tables

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


def highest_phase(stage: Stage) -> Phase:
    """Return the phase of a step with the most memory in use."""
    return max(_phases(stage), key=lambda phase: phase.total)


def _phases(s: Stage) -> Iterator[Phase]:
    layout, c = s.layout, s.compute
    several = layout.grad_accumulation > 1 or layout.pipeline > 1
    # Ranks that share one parameter's states; fewer share those of experts.
    shards = s.parameters / s.parameter_shard
    scattered = s.weights
    # Gradients that are reduced once per step are kept whole, in 32 bits; others as shards.
    whole = several and (layout.sharding in ("none", "optimizer") or layout.pipeline > 1)
    unreduced = 4 * (s.parameters - s.embedding + s.embedding_gradient)
    waiting = (unreduced if whole else scattered) if several else 0.0
    if several and not whole:
        # The last scattered gradient stays until the next micro-batch scatters one.
        waiting += 4 * s.embedding
    resident = 0.0 if layout.shards_parameters else c * s.parameters
    if s.autocast:
        # Gradients belong to the weights, of which autocast keeps 16-bit copies.
        waiting = 4 * s.parameters if several else 0.0

    kept = s.kept(layout.recompute)
    others = (s.held - 1) * (s.layers * kept + s.ends) + s.buffers
    full = s.layers * kept + s.ends + others
    # Cross-entropy in 32 bits: the logits, log-softmax, and gradients of both.
    loss = 12.0 if layout.tensor == 1 else SPLIT_LOSS
    if layout.pipeline > 1:
        loss += c  # The schedule keeps the stage's output.
    if s.last:
        yield Phase(waiting, full, loss * s.logits, resident)
        # The output layer's backward pass.
        ahead = 0.0 if resident else c * (s.head + s.layer)
        yield Phase(
            waiting, full, (c + 4) * s.logits, resident + ahead + c * s.head,
            c * s.shape.hidden * s.tokens,
        )  # fmt: skip
    inside = _backward_of_layer(s)
    for done in {0, min(1, s.layers - 1), max(0, s.layers - 2), s.layers - 1}:
        below = (s.layers - 1 - done) * kept + others
        around = 2 if done < s.layers - 1 else 1
        if layout.pipeline > 1 or whole:
            # Stages keep parameters gathered in a backward pass until the next forward pass.
            gathered = (resident or c * s.layer * min(done + 2, s.layers)) + c * s.layer
            if layout.pipeline == 1:
                gathered += 4 * s.layer - done * c * s.layer
            scattering = waiting
        elif resident:
            # Layers after it have freed their 16-bit weights, and their gradients are shards.
            gathered = resident - done * c * s.layer + c * s.layer + (8 * s.layer if done else 0)
            scattering = max(waiting, 4 * (s.head + done * s.layer) / shards)
        else:
            gathered = around * c * s.layer + c * s.layer + (4 * s.layer if done else 4 * s.head)
            scattering = max(waiting, 4 * (s.head + done * s.layer) / shards)
        yield Phase(scattering, below, 0.0, gathered, inside)
    if layout.pipeline > 1:
        # All gradients are scattered at the end: the embedding's first, then two layers at once.
        once = s.embedding or 2 * s.layer
        left = c * max(0.0, s.parameters - once)
        yield Phase(waiting, s.buffers, 0.0, left, 4 * once * (1 + 1 / shards))
    else:
        rest = max(waiting, 4 * (s.parameters - s.embedding) / shards)
        tied = 2 if s.shape.tied else 1
        left = (c * s.embedding if not whole else 0.0) + c * s.embedding_gradient * tied
        yield Phase(rest, 0.0, 0.0, left + 4 * s.embedding + 4 * s.layer, c * s.stream * s.tokens)
    # Adam updates parameters one by one, or all at once if FSDP does not shard them.
    largest = max(s.embedding, s.head, s.layer / 3)
    update = 4 * s.parameters if s.autocast else 8 * largest / shards
    yield Phase(scattered, s.buffers, 0.0, 0.0, update)


SPLIT_LOSS = 16.0
"""Bytes for each of a rank's logits while the split loss runs."""


def _backward_of_layer(s: Stage) -> float:
    """Peak bytes of one layer's backward pass, without the activations of lower layers."""
    c, shape, t = s.compute, s.shape, s.layout.tensor
    saved = s.kept("none")
    if s.layout.recompute == "selective":
        saved += s.stream * c * s.tokens
    used = shape.experts_per_token + shape.shared_experts if shape.experts else 1
    width = shape.ffn_hidden * used / t
    # During the MLP's backward pass: two more of its widest tensors, gradients of the stream.
    return saved + c * (2 * width + s.stream + shape.hidden) * s.tokens
