"""Memory with sharded parameters (ZeRO-3, FSDP): the highest of a step's phases.

The phases and their terms follow PyTorch's FSDP2 with a shard for each layer and one for the rest,
measured with its tracker (``torch.distributed._tools.FSDPMemTracker``); all in bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from dtrain.parallelism.assumptions import Assumptions
from dtrain.parallelism.backends import backend_of, keeps_stage
from dtrain.parallelism.cost.activations import largest_layer, mean_activations
from dtrain.parallelism.cost.layer import BYTES
from dtrain.parallelism.cost.stages import kinds_of_stages, receive_buffers
from dtrain.parallelism.model.shape import Shape
from dtrain.runtime.layout import Layout

VARIED_AGAIN = 2.0
VARIED = 0.4
"""Cached blocks as a share of a step's tensors, if micro-batches differ in length: short ones split
the blocks that the longest one needs. From a simulation of the allocator with a model's tensors, in
steps of random length before one of the full length: 1.0 to 5.1 with full recomputation (27 runs of
Qwen 1.8B and 7B and Mistral 7B, lengths as in ms-swift's benchmark; mean 2.1), 0.3 to 0.5 without
(4 runs)."""


LOSS = 12.0
"""Bytes for each logit at the peak of PyTorch's loss: a log-softmax, two gradients, of 32 bits."""
SPLIT_LOSS = 16.0
"""Bytes for each of a tensor rank's logits at the peak of DTensor's ``loss_parallel``: the
log-softmax, its exponential, the target's gradient, and their sum, in 32 bits."""


class Phase(NamedTuple):
    """Memory in use at one moment, without the sharded parameters and Adam's moments."""

    gradients: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    gathered: float = 0.0
    """Gathered parameters, and gradients before they are scattered."""
    temporary: float = 0.0


def highest_phase(
    shape: Shape, layout: Layout, assumed: Assumptions,
    *, layers: int, stage: int, held: float,
) -> Phase:  # fmt: skip
    """Return the highest phase of a stage of ``layers``.

    ``held`` is the number of micro-batches in flight; all but one hold all of their activations.
    """
    tokens = _tokens(shape, layout)
    waiting = (held - 1) * layers * mean_activations(shape, layout, assumed, stage) * tokens
    if backend_of(layout).torch_kernels and not assumed.habits.keeps_outputs:
        split = layout.tensor if layout.sequence_parallel else 1
        stream = BYTES[assumed.precision] * shape.hidden / split
        waiting += stream * tokens * receive_buffers(layout, stage)
    phases = _phases(shape, layout, assumed, layers, stage)
    highest = max(phases, key=sum)
    return highest._replace(activations=highest.activations + waiting)


def cached_blocks(
    shape: Shape, layout: Layout, assumed: Assumptions, *, layers: int, stage: int
) -> float:
    """Return the bytes of blocks that the allocator keeps beside a step's highest phase: those of
    other streams, and those in which no tensor of that phase fits (see
    `MemoryHabits.fixed_segments`)."""
    *phases, step = _phases(shape, layout, assumed, layers, stage)
    highest = max(map(sum, (*phases, step)))
    if not assumed.habits.fixed_segments:
        if not layout.shards_parameters:
            return 0.0
        # FSDP2 gathers in one stream and copies from there (``foreach_all_gather``), and allocates
        # the gradients' shards in another (``foreach_reduce``).
        shards = step.gradients
        own = max(sum(p) - (p.gradients if p.gradients <= shards else 0) for p in (*phases, step))
        unit = BYTES[assumed.precision] * _largest_unit(shape, layout, stage)
        return own + shards + unit - highest
    # The phase with the most tensors beside gradients, and the blocks that it leaves unused.
    largest = max(phases, key=lambda phase: sum(phase) - phase.gradients)
    blocks = sum(largest) - largest.gradients
    if assumed.varied_lengths:
        blocks *= 1 + (VARIED_AGAIN if layout.recompute == "full" else VARIED)
    elif layout.recompute == "full" and (layout.shards_parameters or not assumed.fused_loss):
        # Checkpoints split the blocks of the layers and of the logits of the step before, and
        # logits of 16 bits those of 32.
        blocks += largest_layer(shape, layout, assumed, "none") * _tokens(shape, layout)
        if not assumed.fused_loss:
            blocks += 2 * _tokens(shape, layout) * shape.vocab / layout.tensor
    if layout.shards_parameters:
        # Each stream of FSDP has its own blocks: those of gathered parameters and of gradients.
        gradients = max(phase.gradients for phase in (*phases, step))
        return max(0.0, blocks + gradients + step.temporary - highest)
    return max(0.0, blocks + largest.gradients - highest)


def _largest_unit(shape: Shape, layout: Layout, stage: int) -> float:
    """Return the most parameters that are gathered at once: of a layer, or of all that is around
    the layers."""
    first, last = stage == 0, stage == layout.pipeline - 1
    root = shape.embedding_parameters if first else 0
    root += shape.head_parameters if last and not (shape.tied and first) else 0
    whole, _ = _layer(shape, layout.tensor, layout.expert)
    return max(root / layout.tensor, whole)


def _tokens(shape: Shape, layout: Layout) -> float:
    return shape.seq_len * layout.micro_batch / layout.context


def _phases(
    shape: Shape, layout: Layout, assumed: Assumptions, layers: int, stage: int
) -> Iterator[Phase]:
    first, last = stage == 0, stage == layout.pipeline - 1
    t, h = layout.tensor, shape.hidden / layout.tensor
    split = shape.hidden / (t if layout.sequence_parallel else 1)
    tokens = _tokens(shape, layout)
    # Bytes of an element in computation: of gathered parameters, activations and first gradients.
    c = BYTES[assumed.precision]
    layer, experts = _layer(shape, layout.tensor, layout.expert)
    largest = layer
    if shape.pattern:
        # Each kind of layer counts with its number in the stage; the largest one makes the peaks.
        kinds = kinds_of_stages(shape, layout)[stage]
        each = {kind: _layer(kind, layout.tensor, layout.expert) for kind in kinds}
        largest = max([whole for whole, _ in each.values()])
        layer = sum([count * each[kind][0] for kind, count in kinds.items()]) / layers
        experts = sum([count * each[kind][1] for kind, count in kinds.items()]) / layers
    # A rank's share of a layer, and of its gradients, which ZeRO-1 does not shard. Fewer ranks
    # share the experts.
    shards = layout.shards
    summing = 1 if layout.sharding == "optimizer" else shards
    replicas = max(1, layout.copies // layout.expert)
    shard, summed_shard = (
        (layer - experts) / ranks + experts / min(ranks, replicas) for ranks in (shards, summing)
    )
    head = shape.head_parameters / t if last else 0.0
    root = head if last and not (shape.tied and first) else 0.0
    root += shape.embedding_parameters / t if first else 0.0
    # Shares of the parameters that are trained, and bytes of a gathered parameter of a layer.
    stored = 4.0 if assumed.habits.wide_rest else float(c)
    trained, trained_root, gathered = 1.0, 1.0, stored
    if shape.lora is not None:
        trained = shape.adapter_parameters(moe=bool(shape.experts)) / shape.layer_parameters()
        trained_root, gathered = 0.0, shape.frozen_matrix_bytes or stored
    own = 2.0 if assumed.narrow_states else 4.0
    reduced = own if assumed.fp32_gradients else float(c)
    in_place = not layout.shards_parameters and (shape.lora is not None or own == c)
    if in_place:
        # Parameters that need no cast are used where they are, and so are their gradients.
        gathered = reduced = 0.0
    habits = assumed.habits
    every = own * (layers * shard * trained + root * trained_root / shards)
    # A flat parameter of which a part is trained has a gradient of its whole size.
    flat = habits.flat_adapters and layout.shards_parameters
    graded = 1.0 if flat else trained
    summed = own
    if not (layout.shards_parameters or assumed.fp32_gradients):
        # Whole parameters have gradients of their precision, and 32-bit copies beside them.
        summed = min(own, c)
    gradients = summed * (layers * summed_shard * graded + root * trained_root / summing)
    accumulated = gradients
    if layout.grad_accumulation == 1:
        accumulated = 0.0
    elif habits.whole_gradients and layout.shards_parameters:
        whole = layers * layer * graded + root * trained_root
        accumulated = (4.0 if habits.wide_sums else own) * whole

    resident = 0.0 if in_place else stored * root
    released = 0.0
    if (habits.keeps_gathered and layout.shards_parameters) or keeps_stage(layout):
        # Experts without another copy of them are used where they are, if they need no cast.
        copied = layer - experts if replicas == 1 and own == c else layer
        resident += gathered * layers * copied
        released = 0.0 if keeps_stage(layout) else gathered * copied
        gathered = 0.0
    if keeps_stage(layout):
        accumulated = reduced * (layers * layer * graded + root * trained_root)

    kept = mean_activations(shape, layout, assumed, stage) * tokens
    # Inputs of the last norm and of the output layer, which tensor ranks gather.
    ends = (4 if habits.wide_rest else c) * (split + shape.hidden) * tokens if last else 0.0
    predicted = tokens * shape.target_len / shape.seq_len if shape.target_len else tokens
    among = assumed.loss_chunks * (1 if habits.gathers_logits else t)
    logits = predicted * shape.vocab / among if last else 0.0

    yield Phase(accumulated, layers * kept + ends, _loss(layout, assumed) * logits, resident)
    # The output layer's backward pass, with its gradient and that of the logits.
    yield Phase(
        accumulated, layers * kept + ends + c * split * tokens, c * logits,
        resident + c * head * trained_root + gathered * largest,
    )  # fmt: skip

    whole = kept
    if layout.recompute != "none" or shape.pattern:
        whole = largest_layer(shape, layout, assumed, "none") * tokens
    width = shape.ffn_hidden / t
    # During the MLP's backward pass: two more of its widest tensors, a product's gradients.
    inside = whole + c * ((2 if shape.gated else 1) * width + split) * tokens
    # A matrix's gradient, or a frozen matrix of 4 bits as its product needs it.
    inside += c * width * h if shape.lora is None or shape.lora.expands else 0.0
    recomputed = c * split * tokens if layout.recompute == "full" else 0.0
    frozen = shape.lora is not None and layout.shards_parameters
    left = 2 * recomputed if frozen and habits.keeps_inputs else 0.0
    end_of_layer = c * (5 * split * tokens + largest * graded)
    for done in {0, min(1, layers - 1), max(0, layers - 2), layers - 1}:
        below = (layers - 1 - done) * kept + done * left
        ahead = gathered * largest if done < layers - 1 else 0.0
        working = max(inside if not recomputed else inside - recomputed + kept, end_of_layer)
        yield Phase(
            accumulated or done * summed * summed_shard * graded,
            below,
            0.0,
            resident
            - done * released
            + c * head * trained_root
            + gathered * largest
            + ahead
            + (reduced * largest * graded if done else 0.0),
            working,
        )
    # The gradients of embedding and output layer are scattered last.
    resident -= layers * released
    rest = accumulated or summed * layers * summed_shard * graded
    tied = c * (3 if shape.tied else 2) * trained_root
    yield Phase(rest, 0.0, 0.0, resident + reduced * trained_root * root)
    yield Phase(
        rest, 0.0, 0.0, resident + reduced * largest * graded, tied * head + c * split * tokens
    )  # fmt: skip
    # The optimizer's update works on copies of all shards (foreach), or of more than these, or on
    # two of one shard.
    copies = every if habits.foreach else min(every, 8 * max(shard, root / shards))
    if habits.fused_adam:
        copies = 0.0
    yield Phase(gradients, 0.0, 0.0, 0.0, max(copies, every * assumed.step_copies / 4))


def _loss(layout: Layout, assumed: Assumptions) -> float:
    """Return the bytes for each of a rank's logits at the loss's peak. Fused: the logits, which
    their gradient overwrites."""
    if assumed.fused_loss:
        return float(BYTES[assumed.precision])
    split = layout.tensor > 1 and not assumed.habits.gathers_logits
    own = SPLIT_LOSS if split and backend_of(layout).torch_kernels else LOSS
    return (assumed.loss_bytes or own) + (4 if assumed.habits.holds_outputs else 0)


@lru_cache(maxsize=4096)
def _layer(shape: Shape, tensor: int, expert: int) -> tuple[float, float]:
    """Parameters of one layer on one tensor and expert rank, and of its experts alone."""
    every = shape.experts * shape.expert_parameters
    held = every / expert
    return (shape.layer_parameters() - every + held) / tensor, held / tensor
