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

from dtrain.parallelism.cost.runtime_memory import Stage
from dtrain.parallelism.cost.sharded_memory import Phase

SPLIT_LOSS = 16.0
"""Bytes for each of a rank's logits while the split loss runs."""


def highest_phase(stage: Stage) -> Phase:
    """Return the phase of a step with the most memory in use."""
    phases = _Phases(stage)
    return max(
        (*phases.ends_of_forward(), *phases.backward(), *phases.after_layers()),
        key=lambda phase: phase.total,
    )


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
    def kept(self) -> float:
        return self.s.kept(self.s.layout.recompute)

    @cached_property
    def others(self) -> float:
        """Activations of the other micro-batches in a pipeline."""
        s = self.s
        return (s.held - 1) * (s.layers * self.kept + s.ends) + s.buffers

    def ends_of_forward(self) -> Iterator[Phase]:
        """The last layer's forward pass, the loss, and the output layer's backward pass."""
        s, c, layout = self.s, self.s.compute, self.s.layout
        full = s.layers * self.kept + s.ends + self.others
        # The last layer's flat buffer, and its parameters if they are not resident.
        gathered = self.resident if self.several else max(0.0, self.resident - c * s.head)
        gathered += c * s.layer * (1 if self.resident else 2)
        ahead = c * (s.stream + s.shape.hidden) * s.tokens
        yield Phase(self.waiting, full - s.ends, 0.0, gathered, ahead)
        if not s.last:
            return
        # The last gradient that was scattered stays until the next micro-batch scatters one.
        left = 4 * s.embedding if self.several and not self.whole else 0.0
        # Cross-entropy in 32 bits: the logits, log-softmax, and gradients of both.
        loss = 12.0 if layout.tensor == 1 else SPLIT_LOSS
        if layout.pipeline > 1:
            loss += c  # The schedule keeps the stage's output.
        yield Phase(self.waiting + left, full, loss * s.logits, self.resident)
        flat = 0.0 if self.resident else c * (s.head + s.layer)
        yield Phase(
            self.waiting + left, full, (c + 4) * s.logits, self.resident + flat + c * s.head,
            c * s.shape.hidden * s.tokens,
        )  # fmt: skip

    def backward(self) -> Iterator[Phase]:
        """The backward pass of the first, second, last but one and last layer that it reaches."""
        s = self.s
        for done in {0, min(1, s.layers - 1), max(0, s.layers - 2), s.layers - 1}:
            below = (s.layers - 1 - done) * self.kept + self.others
            if self.whole:
                # A micro-batch that is not the step's last one frees and reduces nothing.
                middle = s.layout.pipeline > 1 or s.layout.grad_accumulation > 2 or s.autocast
                if middle:
                    gathered = self.resident or self._gathered_by_stage(done)
                    for gradients, working in self._inside():
                        yield Phase(self.waiting, below, 0.0, gathered, gradients + working)
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
        scattered = 4 * (s.head + done * s.layer) / self.shards
        if self.whole:
            freed = s.reduced * (s.head + done * s.layer)
            scattered += self.waiting - freed
        else:
            scattered = max(self.waiting, scattered)
        previous = s.reduced * rest if done else 0.0
        mlp, attention, end = self._inside()
        if bank:
            yield Phase(scattered, below, 0.0, gathered + previous, sum(mlp))
            # The experts' gradients are complete, then reduced while attention computes.
            inside = s.attention + c * (s.stream + s.shape.hidden) * s.tokens
            yield Phase(scattered, below, 0.0, gathered + previous, c * bank + inside)
            gathered += s.reduced * bank - c * bank
            yield Phase(scattered, below, 0.0, gathered, c * bank + inside)
            yield Phase(scattered, below, 0.0, gathered, attention[1])
            return
        for gradients, working in (mlp, attention, end):
            yield Phase(scattered, below, 0.0, gathered + previous, gradients + working)
        reduction = s.reduced * s.layer + 4 * s.layer / self.shards
        yield Phase(scattered, below, 0.0, gathered + reduction, c * s.stream * s.tokens)

    def _inside(self) -> Iterator[tuple[float, float]]:
        """Bytes of a layer's own gradients, and of what it works with, without the activations of
        lower layers: in its MLP's backward pass, in attention's, and at its end."""
        s, c, shape, t = self.s, self.s.compute, self.s.shape, self.s.layout.tensor
        saved = s.kept("none")
        if s.layout.recompute == "selective":
            saved += s.stream * c * s.tokens
        around = c * (s.stream + shape.hidden) * s.tokens
        # Two more of the MLP's widest tensors.
        widest = 2 * c * s.width * s.tokens
        yield c * s.matrix, saved + around + widest
        # Queries turn back in 32 bits.
        turned = 6 * shape.heads * shape.head_size / t * s.tokens if shape.gated else 0.0
        yield c * (s.layer - s.attention_parameters), around + s.attention + turned
        yield c * s.layer, around

    def after_layers(self) -> Iterator[Phase]:
        """The embedding's gradient, what is reduced last, and the optimizer."""
        s, c, layout = self.s, self.s.compute, self.s.layout
        stream = c * s.stream * s.tokens
        if self.whole:
            gathered = self.resident or self._gathered_by_stage(s.layers - 1)
            yield Phase(
                self.waiting, self.others, 0.0, gathered, c * s.embedding_gradient + stream
            )
        if layout.pipeline > 1:
            # All gradients are reduced at the end: the embedding's first, then two layers at once.
            once = s.embedding or 2 * s.layer
            left = c * max(0.0, s.parameters - once)
            yield Phase(
                self.waiting, s.buffers, 0.0, left, (s.reduced + 4 / self.shards) * once
            )
        else:
            rest = max(self.waiting, 4 * (s.parameters - s.embedding) / self.shards)
            tied = 2 if s.shape.tied else 1
            left = (c * s.embedding if not self.whole else 0.0) + c * s.embedding_gradient * tied
            reduction = s.reduced * (s.embedding + s.layer)
            yield Phase(rest, 0.0, 0.0, left + reduction, stream)
        # Adam updates parameters one by one, or all at once if FSDP does not shard them.
        largest = max(s.embedding, s.head, s.layer / 3)
        update = 4 * s.parameters if s.autocast else 8 * largest / self.shards
        yield Phase(s.weights, s.buffers, 0.0, 0.0, update)
