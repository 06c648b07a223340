"""Memory of a layout that ``dtrain.runtime`` trains: the highest of a step's phases, in bytes.

The order of events is that of PyTorch's autograd and FSDP2 (``_fsdp_param_group.py``):

- A layer's gradients are complete while its gathered parameters and the previous layer's input of
  a reduction are still in memory. Then both are freed, and its own input is allocated.
- In a backward pass, the next parameters arrive in one flat buffer while a layer computes. In a
  forward pass, a layer's flat buffer stays until the next layer has gathered.
- Experts on several ranks are gathered and reduced apart from the rest of their layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from dtrain.parallelism.assumptions import Assumptions
from dtrain.parallelism.cost.runtime_memory import Stage
from dtrain.parallelism.cost.sharded_memory import Phase
from dtrain.parallelism.cost.stages import in_flight, stage_layers
from dtrain.parallelism.model.shape import Shape
from dtrain.runtime.layout import Layout

SPLIT_LOSS = 16.0
"""Bytes for each of a rank's logits while the split loss runs."""


def highest_phase(stage: Stage) -> Phase:
    """Return the phase of a step with the most memory in use."""
    phases = _Phases(stage)
    return max(
        (*phases.ends_of_forward(), *phases.backward(), *phases.after_layers()),
        key=lambda phase: phase.total,
    )


def allocated(shape: Shape, layout: Layout, assumed: Assumptions, stage: int = 0) -> float:
    """Return the most bytes that the allocator counts on a rank of pipeline rank ``stage``."""
    layers = stage_layers(shape, layout)[stage]
    found = Stage(shape, layout, assumed, stage, layers, in_flight(layout, stage))
    return highest_phase(found).total + found.weights + found.moments


@dataclass(frozen=True)
class _Phases:
    s: Stage

    @property
    def several(self) -> bool:
        """Whether gradients add up over micro-batches."""
        return self.s.layout.grad_accumulation > 1 or self.s.layout.pipeline > 1

    @property
    def whole(self) -> bool:
        """Whether gradients are reduced once per step, and kept whole until then."""
        layout = self.s.layout
        unsharded = layout.sharding in ("none", "optimizer")
        return self.several and (unsharded or layout.pipeline > 1)

    @cached_property
    def shards(self) -> float:
        """Ranks that share one parameter's states; fewer share those of experts."""
        return self.s.parameters / self.s.parameter_shard

    @cached_property
    def waiting(self) -> float:
        """Gradients of earlier micro-batches: whole, in the format of their reduction, or shards
        in 32 bits."""
        s = self.s
        if not self.several:
            return 0.0
        if s.autocast:
            # Gradients belong to the weights, of which autocast keeps 16-bit copies.
            return 4 * s.parameters
        if not self.whole:
            return s.weights
        return s.reduced * (s.parameters - s.embedding + s.embedding_gradient)

    @property
    def scattered(self) -> int:
        """Bytes of a reduced gradient's element. If copies add up 16-bit gradients, those stay
        until the end of the backward pass."""
        copied = self.s.layout.sharding in ("none", "hybrid")
        return 6 if copied and self.s.reduced == 2 else 4

    @cached_property
    def resident(self) -> float:
        """Parameters that a micro-batch leaves gathered."""
        return 0.0 if self.s.layout.shards_parameters else self.s.compute * self.s.parameters

    @property
    def root(self) -> float:
        """Bytes of a tied matrix, which stays gathered during the backward pass, and of its first
        gradient, which waits for the second."""
        s = self.s
        if not s.shape.tied:
            return 0.0
        return s.compute * s.head * (1 if self.resident else 2)

    @cached_property
    def others(self) -> float:
        """Activations of the other micro-batches in a pipeline, whose schedule also keeps what the
        stage sent of every micro-batch in flight."""
        s = self.s
        sent = 0.0 if s.last else s.held * s.compute * s.stream * s.tokens
        return (s.held - 1) * (s.layers * self.s.kept + s.ends) + sent + s.buffers

    def ends_of_forward(self) -> Iterator[Phase]:
        """The last layer's forward pass, the loss, and the output layer's backward pass."""
        s, c, layout = self.s, self.s.compute, self.s.layout
        full = s.layers * self.s.kept + s.ends + self.others
        if not self.resident:
            # The last layer's parameters, and the flat buffer in which they came.
            gathered = 2 * c * s.layer
        elif self.several:
            gathered = self.resident
        else:
            gathered = self.resident - c * s.head + c * s.layer
        ahead = c * (s.stream + s.shape.hidden) * s.tokens
        yield Phase(self.waiting, full - s.ends, 0.0, gathered, max(ahead, self._sent_to_experts))
        if not s.last:
            return
        # The last gradient that was scattered stays until the next micro-batch scatters one.
        left = 4 * s.embedding if self.several and not self.whole else 0.0
        # Cross-entropy in 32 bits: the logits, log-softmax, and gradients of both.
        loss = 12.0 if layout.tensor == 1 else SPLIT_LOSS
        if layout.pipeline > 1:
            loss += c  # The schedule keeps the stage's output.
        yield Phase(self.waiting + left, full, loss * s.logits, self.resident)
        # The output layer's gradient beside its parameters, which came in a flat buffer.
        gathered = self.resident or c * s.head
        stream = c * s.shape.hidden * s.tokens
        yield Phase(self.waiting + left, full, c * s.logits, gathered + c * s.head, stream)
        if not self.whole and not s.shape.tied:
            gathered = max(0.0, self.resident - c * s.head) + (c + s.reduced) * s.head
            yield Phase(self.waiting, full, 0.0, gathered, stream)

    @property
    def _sent_to_experts(self) -> float:
        """Bytes of tokens in a mixture's forward pass that no backward pass needs: outputs to be
        joined; with ranks that exchange tokens, also both sides of the exchange and its result."""
        return (4 if self.s.layout.expert > 1 else 1) * self.s.routed

    def backward(self) -> Iterator[Phase]:
        """The backward pass of the first, second, last but one and last layer that it reaches."""
        s = self.s
        for done in {0, min(1, s.layers - 1), max(0, s.layers - 2), s.layers - 1}:
            below = (s.layers - 1 - done) * self.s.kept + self.others
            if self.whole:
                # A micro-batch that is not the step's last one frees and reduces nothing.
                middle = s.layout.pipeline > 1 or s.layout.grad_accumulation > 2 or s.autocast
                if middle:
                    gathered = self.resident or self._gathered_by_stage(done)
                    for own, working in (*self._mlp_backward(), *self._attention_backward()):
                        yield Phase(self.waiting, below, 0.0, gathered, own + working)
                if s.layout.pipeline > 1:
                    continue
            yield from self._last_micro_batch(done, below)

    def _gathered_by_stage(self, done: int) -> float:
        """Stages keep what a backward pass gathers until the next forward pass."""
        s = self.s
        return s.compute * s.layer * min(done + 2, s.layers)

    def _last_micro_batch(self, done: int, below: float) -> Iterator[Phase]:
        s, c, layout = self.s, self.s.compute, self.s.layout
        bank, rest = s.bank, s.layer - s.bank
        own = c * s.layer
        if self.resident:
            kept_gathered = layout.sharding == "gradients" and layout.grad_accumulation > 2
            freed = 0.0 if kept_gathered else c * (s.head + done * s.layer)
            gathered = self.resident - freed + self.root
        else:
            gathered = own + c * (rest if done < s.layers - 1 else s.embedding) + self.root
        scattered = self.scattered * (s.head + done * s.layer) / self.shards
        if self.whole:
            freed = s.reduced * (s.head + done * s.layer)
            scattered += self.waiting - freed
        else:
            scattered = max(self.waiting, scattered)
        previous = s.reduced * rest if done else 0.0
        for own_gradients, working in self._mlp_backward():
            yield Phase(scattered, below, 0.0, gathered + previous, own_gradients + working)
        if bank:
            # While attention computes, the experts' gradients are reduced.
            gathered += (s.reduced - c) * bank - previous
        for own_gradients, working in self._attention_backward():
            yield Phase(scattered, below, 0.0, gathered + previous, own_gradients + working)
        if not bank:
            reduction = (s.reduced + 4 / self.shards) * s.layer
            yield Phase(scattered, below, 0.0, gathered + reduction, c * s.stream * s.tokens)

    def _mlp_backward(self) -> Iterator[tuple[float, float]]:
        """Bytes of a layer's own gradients, and of what it works with, without the activations of
        lower layers; of experts, for the first and for the last one."""
        s, c = self.s, self.s.compute
        if s.layout.offload_activations and s.layout.tensor == 1:
            # A product's inputs return one after the other: two, and the gradient of their product.
            saved = c * (s.stream + s.shape.hidden + 3 * s.width) * s.tokens
        else:
            saved = s.saved("none") + c * s.stream * s.tokens
        if s.layout.recompute == "selective":
            saved += c * s.stream * s.tokens
        # Two more of the MLP's widest tensors.
        saved += 2 * c * s.width * s.tokens
        yield c * s.matrix, saved
        if s.shape.experts:
            last = saved - s.mlp * (1 - 1 / s.experts_here) + s.routed
            yield c * (s.layer - s.attention_parameters), last
            if s.layout.recompute != "none":
                yield 0.0, s.saved("none") + self._sent_to_experts

    def _attention_backward(self) -> Iterator[tuple[float, float]]:
        """As `_mlp_backward`, for attention, and for the end of the layer."""
        s, c, shape = self.s, self.s.compute, self.s.shape
        around = c * (s.stream + shape.hidden) * s.tokens
        # Queries turn back in 32 bits.
        queries = shape.heads * shape.head_size / s.layout.tensor * s.tokens
        turned = 6 * queries if shape.gated else 0.0
        yield c * (s.layer - s.attention_parameters), around + s.attention + turned
        yield c * (s.layer - s.bank), around

    def after_layers(self) -> Iterator[Phase]:
        """The embedding's gradient, what is reduced last, and the optimizer."""
        s, c, layout = self.s, self.s.compute, self.s.layout
        stream = c * s.stream * s.tokens
        if self.whole:
            gathered = self.resident or self._gathered_by_stage(s.layers - 1)
            yield Phase(self.waiting, self.others, 0.0, gathered, c * s.embedding_gradient + stream)
        if layout.pipeline > 1:
            # All gradients are reduced at the end: the embedding's first, then two layers at once.
            once = s.embedding or 2 * s.layer
            left = c * max(0.0, s.parameters - once)
            yield Phase(self.waiting, s.buffers, 0.0, left, (s.reduced + 4 / self.shards) * once)
        else:
            rest = self.scattered * (s.parameters - s.embedding) / self.shards
            rest = max(self.waiting, rest)
            # Tensor ranks sum the gradient of the whole vocabulary into a copy of their share.
            share = s.embedding if layout.tensor > 1 else 0.0
            gradient = c * s.embedding_gradient * (2 if s.shape.tied else 1)
            if self.whole:
                gradient, share = 0.0, s.reduced * share
            else:
                share *= c
                before = c * s.embedding + s.reduced * s.layer
                yield Phase(rest, 0.0, 0.0, gradient + share + before, stream)
            reduction = (s.reduced + 4 / self.shards) * s.embedding
            yield Phase(rest, 0.0, 0.0, (share or gradient) + reduction, stream)
        # Adam updates parameters one by one, or all at once if FSDP does not shard them.
        largest = max(s.embedding, s.head, s.layer / 3)
        update = 4 * s.parameters if s.autocast else 8 * largest / self.shards
        yield Phase(s.weights, s.buffers, 0.0, 0.0, update)
