"""Memory of a layout that ``dtrain.runtime`` trains: the highest of a step's phases, in bytes.

The order of events is that of PyTorch's autograd and FSDP2 (``_fsdp_param_group.py``):

- A layer's gradients are complete while its gathered parameters and the previous layer's input of
  a reduction are still in memory. Then both are freed, and its own input is allocated. The
  gradients are freed before the result is allocated, but not the last one, which a variable in
  ``foreach_reduce`` holds: the only one of the embedding and of the output layer.
- In a backward pass, the next parameters arrive in one flat buffer while a layer computes. In a
  forward pass, a layer's flat buffer stays until the next layer's is copied to its parameters.
- Experts on several ranks are gathered and reduced apart from the rest of their layer.
- With ``CPUOffloadPolicy``, a gradient's shard goes to the host at the end of its reduction
  (``foreach_reduce``), where later ones are added to it. What is not reduced waits on the GPU:
  whole gradients that are reduced once per step, and the sums over a shard's ranks that copies of
  the shard add up (``partial_reduce_output``). The buffer of that all-reduce stays, too, until the
  end of the backward pass (``AllReduceState``).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from dtrain.parallelism.cost.runtime_memory import Stage
from dtrain.parallelism.cost.sharded_memory import LOSS, SPLIT_LOSS, Phase


def highest_phase(stage: Stage) -> Phase:
    """Return the phase of a step with the most memory in use."""
    phases = _Phases(stage)
    return max(chain(phases.ends_of_forward(), phases.backward(), phases.after_layers()), key=sum)


class _Phases:
    def __init__(self, stage: Stage) -> None:
        s, layout, c = stage, stage.layout, stage.layer.compute
        self.s = s
        self.several = layout.grad_accumulation > 1 or layout.pipeline > 1
        """Whether gradients add up over micro-batches."""
        unsharded = layout.sharding in ("none", "optimizer")
        self.whole = self.several and (unsharded or layout.pipeline > 1)
        """Whether gradients are reduced once per step, and kept whole until then."""
        self.shards = s.parameters / s.parameter_shard
        """Ranks that share one parameter's states; fewer share those of experts."""
        result = 4 if s.reduced == 4 else s.reduced + 4
        self.result = result / self.shards
        """Bytes of an element in the result of a gradient's reduction, and in its 32-bit copy."""
        copied = layout.sharding in ("none", "hybrid")
        self.scattered = (s.reduced if layout.offload else result) if copied else s.stored
        """Bytes of an element in a shard's gradient after its reduction, in the backward pass."""
        self.summed = self._summed() if self.several else 0.0
        """Bytes of a parameter's gradient of the earlier micro-batches."""
        self.waiting = self.summed * s.parameters
        if self.whole and not s.layer.autocast:
            self.waiting += self.summed * (s.embedding_gradient - s.embedding)
        self.left = s.reduced * s.embedding if self.several and not self.whole else 0.0
        """The input of a micro-batch's last reduction, which stays until the next micro-batch's
        first one."""
        self.resident = 0.0 if layout.shards_parameters else c * s.parameters
        """Parameters that a micro-batch leaves gathered."""
        alone = self.resident or not self.several or layout.pipeline > 1 or s.shape.tied
        self.ahead = 0.0 if alone else c * s.head
        """Bytes of the output layer in a flat buffer: the embedding's backward pass gathers ahead
        what came before it, in the micro-batch before. The next forward pass uses it."""
        self.root = c * s.head * (1 if self.resident else 2) if s.shape.tied else 0.0
        """Bytes of a tied matrix, which stays gathered during the backward pass, and of its first
        gradient, which waits for the second."""
        stream = c * s.layer.stream * s.layer.tokens
        sent = 0.0 if s.last else s.held * stream
        self.others = (s.held - 1) * (s.layers * s.layer.kept + s.ends) + sent + s.buffers
        """Activations of the other micro-batches in a pipeline, whose schedule also keeps what the
        stage sent of every micro-batch in flight."""

    def _summed(self) -> float:
        s = self.s
        if s.layer.autocast:
            # Gradients belong to the weights, of which autocast keeps 16-bit copies.
            return 4
        if self.whole:
            return s.reduced
        return (s.reduced if s.layout.sharding == "hybrid" else s.stored) / self.shards

    def ends_of_forward(self) -> Iterator[Phase]:
        """The last layer's forward pass, the loss, and the output layer's backward pass."""
        s, layer, layout = self.s, self.s.layer, self.s.layout
        c = layer.compute
        full = s.layers * layer.kept + s.ends + self.others
        if not self.resident:
            # The last layer's parameters, and the flat buffer in which they came.
            gathered = 2 * c * layer.parameters
        elif self.several:
            gathered = self.resident
        else:
            gathered = self.resident - c * s.head + c * layer.parameters
        ahead = max(layer.around, layer.sent_to_experts)
        gathered += self.ahead if layout.grad_accumulation > 2 else 0.0
        waiting = self.waiting + self.left
        yield Phase(waiting, full - s.ends, 0.0, gathered, ahead)
        if not self.resident:
            # While a buffer is copied to the parameters, the one of the layer before is there.
            before = c * (layer.parameters - layer.bank)
            yield Phase(waiting, full - s.ends - layer.kept, 0.0, gathered + before)
            yield Phase(waiting, self.others, 0.0, gathered + c * s.embedding)
            yield Phase(waiting, full, 0.0, 2 * c * s.head)
        if not s.last:
            return
        loss = LOSS if layout.tensor == 1 else SPLIT_LOSS
        if layout.pipeline > 1:
            loss += c  # The schedule keeps the stage's output.
        yield Phase(self.waiting + self.left, full, loss * s.logits, self.resident)
        # The output layer's gradient beside its parameters, which came in a flat buffer.
        gathered = self.resident or c * s.head
        stream = c * s.shape.hidden * layer.tokens
        yield Phase(self.waiting + self.left, full, c * s.logits, gathered + c * s.head, stream)
        if not self.whole and not s.shape.tied:
            gathered = max(0.0, self.resident - c * s.head) + (c + s.reduced + self.result) * s.head
            yield Phase(self.waiting, full, 0.0, gathered, stream)

    def backward(self) -> Iterator[Phase]:
        """The backward pass of the first, second, last but one and last layer that it reaches."""
        s, layer = self.s, self.s.layer
        # A micro-batch that is not the step's last one frees and reduces nothing.
        accumulating = s.layout.pipeline > 1 or s.layout.grad_accumulation > 2 or layer.autocast
        for done in {0, min(1, s.layers - 1), max(0, s.layers - 2), s.layers - 1}:
            below = (s.layers - 1 - done) * layer.kept + self.others
            if self.whole and accumulating:
                gathered = self.resident or self._gathered_by_stage(done)
                working = max(layer.mlp_backward, layer.attention_backward)
                yield Phase(self.waiting, below, 0.0, gathered, working)
            if not self.whole or s.layout.pipeline == 1:
                yield from self._last_micro_batch(done, below)

    def _gathered_by_stage(self, done: int) -> float:
        """Stages keep what a backward pass gathers until the next forward pass."""
        layer = self.s.layer
        return layer.compute * layer.parameters * min(done + 2, self.s.layers)

    def _last_micro_batch(self, done: int, below: float) -> Iterator[Phase]:
        s, layer, layout = self.s, self.s.layer, self.s.layout
        c, bank = layer.compute, layer.bank
        rest = layer.parameters - bank
        if self.resident:
            kept_gathered = layout.sharding == "gradients" and layout.grad_accumulation > 2
            freed = 0.0 if kept_gathered else c * (s.head + done * layer.parameters)
            gathered = self.resident - freed + self.root
        else:
            following = rest if done < s.layers - 1 else s.embedding
            gathered = c * layer.parameters + c * following + self.root
        reduced = s.head + done * layer.parameters
        scattered = self._gradients(reduced)
        previous = s.reduced * rest if done else self.left * s.shape.tied
        yield Phase(scattered, below, 0.0, gathered + previous, layer.mlp_backward)
        if bank:
            # While attention computes, the experts' gradients are reduced.
            gathered += (s.reduced - c) * bank - previous
        yield Phase(scattered, below, 0.0, gathered + previous, layer.attention_backward)
        if not bank:
            # The parameters are freed first, and the gradients before the result is allocated.
            waits = s.reduced if self.whole else c
            reduction = s.reduced + max(0.0, self.result - waits) - (c if self.whole else 0)
            reduction *= layer.parameters
            stream = c * layer.stream * layer.tokens
            yield Phase(scattered, below, 0.0, gathered + reduction, stream)

    def _gradients(self, reduced: float) -> float:
        """Bytes of gradients when the last micro-batch has reduced those of ``reduced``
        parameters."""
        return self.waiting + (self.scattered / self.shards - self.summed) * reduced

    def after_layers(self) -> Iterator[Phase]:
        """The embedding's gradient, what is reduced last, and the optimizer."""
        s, layer, layout = self.s, self.s.layer, self.s.layout
        c = layer.compute
        stream = c * layer.stream * layer.tokens
        if self.whole:
            gathered = self.resident or self._gathered_by_stage(s.layers - 1)
            yield Phase(self.waiting, self.others, 0.0, gathered, c * s.embedding_gradient + stream)
        if layout.pipeline > 1:
            # All gradients are reduced at the end: the embedding's first, then two layers at once.
            once = s.embedding or 2 * layer.parameters
            left = c * max(0.0, s.parameters - once)
            yield Phase(self.waiting, s.buffers, 0.0, left, (s.reduced + self.result) * once)
        else:
            rest = self._gradients(s.parameters - s.embedding)
            # Tensor ranks sum the gradient of the whole vocabulary into a copy of their share.
            share = s.embedding if layout.tensor > 1 else 0.0
            gradient = c * s.embedding_gradient * (2 if s.shape.tied else 1)
            if self.whole:
                gradient, share = 0.0, s.reduced * share
            else:
                share *= c
                before = c * s.embedding + s.reduced * layer.parameters
                yield Phase(rest, 0.0, 0.0, gradient + share + before, stream)
            reduction = (s.reduced + self.result) * s.embedding
            yield Phase(rest, 0.0, 0.0, (share or gradient) + self.ahead + reduction, stream)
        # Adam updates parameters one by one, or all at once if FSDP does not shard them.
        largest = max(s.embedding, s.head, layer.parameters / 3)
        update = 4 * s.parameters if layer.autocast else 2 * s.stored * largest / self.shards
        yield Phase(s.weights, s.buffers, 0.0, 0.0, update)
