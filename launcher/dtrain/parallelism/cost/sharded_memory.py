"""Memory with sharded parameters (ZeRO-3, FSDP): the highest of a step's phases.

The phases and their terms follow PyTorch's FSDP2 with a shard for each layer and one for the rest,
measured with its tracker (``torch.distributed._tools.FSDPMemTracker``); all in bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from dtrain.parallelism.assumptions import COMPILED_LOSS, Assumptions
from dtrain.parallelism.backends import backend_of, keeps_stage
from dtrain.parallelism.cost.activations import (
    largest_layer,
    mean_activations,
    routed_activations,
    routed_gradients,
)
from dtrain.parallelism.cost.layer import BYTES
from dtrain.parallelism.cost.products import tokens
from dtrain.parallelism.cost.stages import StageRank, kinds_of_stages, receive_buffers
from dtrain.parallelism.model.shape import Shape, residual
from dtrain.records import cached_property, dataclass
from dtrain.runtime.layout import Layout

CACHED_RECOMPUTED = 2.0
"""Cached blocks as a share of a step's tensors with full recomputation, if micro-batches differ in
length: short ones split the blocks that the longest one needs. A simulation of the allocator with a
model's tensors, in steps of random length before one of the full length, found 1.0 to 5.1 (27 runs
of Qwen 1.8B and 7B and Mistral 7B, lengths as in ms-swift's benchmark; mean 2.1)."""
CACHED_KEPT = 0.4
"""The share without full recomputation: 0.3 to 0.5 in 4 runs of the simulation."""
LOSS = 12.0
"""Bytes for each logit at the peak of PyTorch's loss: a log-softmax, two gradients, of 32 bits."""
SPLIT_LOSS = 16.0
"""Bytes for each of a tensor rank's logits at the peak of DTensor's ``loss_parallel``: the
log-softmax, its exponential, the target's gradient, and their sum, in 32 bits."""
SPLIT_COMPILED_LOSS = 10.0
"""The same with ``torch.compile``, which cannot merge what the ranks' sums separate: logits of 16
bits, and the log-softmax and the gradient of 32."""


class Phase(NamedTuple):
    """Memory in use at one moment, without the sharded parameters and Adam's moments."""

    gradients: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    gathered: float = 0.0
    """Gathered parameters, and gradients before they are scattered."""
    temporary: float = 0.0


def peak(rank: Rank, held: float) -> tuple[Phase, float]:
    """Return the highest phase, and the bytes of blocks that the allocator keeps beside it.

    ``held`` is the number of micro-batches in flight; all but one hold all of their activations.
    """
    waiting = (held - 1) * rank.layers * rank.kept
    buffers = 0.0
    if backend_of(rank.layout).torch_kernels and not rank.assumed.habits.keeps_outputs:
        buffers = rank.stream * receive_buffers(rank.layout, rank.stage)
    *passes, step = _phases(rank)
    phases = [phase._replace(activations=phase.activations + waiting + buffers) for phase in passes]
    # The step comes when all backward passes have ended. The buffers are there for the next one.
    phases.append(step._replace(activations=buffers))
    highest = max(phases, key=sum)
    return highest, _cached_blocks(rank, phases, sum(highest))


def _cached_blocks(rank: Rank, phases: list[Phase], highest: float) -> float:
    """Return the bytes of blocks of other streams, and of those in which no tensor of the highest
    phase fits (see `MemoryHabits.fixed_segments`)."""
    layout, assumed = rank.layout, rank.assumed
    *passes, step = phases
    if not assumed.habits.fixed_segments:
        if not layout.shards_parameters:
            return 0.0
        # FSDP2 gathers in one stream and copies from there (``foreach_all_gather``), and allocates
        # the gradients' shards in another (``foreach_reduce``).
        shards = step.gradients
        most = 1.001 * shards  # Sums of the same shards in another order differ slightly.
        beside = [sum(p) - (p.gradients if p.gradients < most else 0) for p in phases]
        beside[0] += rank.freed_logits
        return max(beside) + shards + rank.compute * rank.largest_unit - highest
    # The phase with the most tensors beside gradients, and the blocks that it leaves unused.
    largest = max(passes, key=lambda phase: sum(phase) - phase.gradients)
    blocks = sum(largest) - largest.gradients
    if assumed.varied_lengths:
        blocks *= 1 + (CACHED_RECOMPUTED if layout.recompute == "full" else CACHED_KEPT)
    elif layout.recompute == "full" and (layout.shards_parameters or not assumed.fused_loss):
        # Checkpoints split the blocks of the layers and of the logits of the step before, and
        # logits of 16 bits those of 32.
        blocks += largest_layer(rank) * rank.tokens
        if not assumed.fused_loss:
            blocks += 2 * rank.logit_count
    gradients = largest.gradients
    if layout.shards_parameters:
        # Each stream of FSDP has its own blocks: those of gathered parameters and of gradients.
        gradients = max(phase.gradients for phase in phases) + step.temporary
    return max(0.0, blocks + gradients - highest)


class _Layers(NamedTuple):
    """Numbers of parameters of a stage's layers on one tensor and expert rank."""

    mean: float
    experts: float
    """Parameters of the mean layer's experts."""
    largest: float


@dataclass(frozen=True)
class Rank(StageRank):
    """Sizes of what one rank of a pipeline stage holds, in bytes, or as numbers of parameters."""

    @cached_property
    def tokens(self) -> float:
        """Of one micro-batch."""
        return tokens(self.shape, self.layout)

    @cached_property
    def compute(self) -> int:
        """Bytes of an element in computation: of activations and of gradients at first."""
        return BYTES[self.assumed.precision]

    @cached_property
    def stored(self) -> float:
        """Bytes of a gathered parameter that is not in 4 bits."""
        return 4.0 if self.assumed.habits.wide_rest else float(self.compute)

    @property
    def own(self) -> float:
        """Bytes of a parameter in its shard, and of a gradient in its sum."""
        return 2.0 if self.assumed.narrow_states else 4.0

    @property
    def on_host(self) -> str:
        """What is in the host's memory, as `MemoryHabits.offloads`."""
        return self.assumed.habits.offloads if self.layout.offload else ""

    @cached_property
    def cast(self) -> bool:
        """Whether a copy of the parameters in the precision of the products is made."""
        return self.shape.lora is None and self.own != self.compute

    @cached_property
    def in_place(self) -> bool:
        """Whether parameters, which need no cast, are used where they are, and their gradients."""
        return not self.layout.shards_parameters and not self.cast

    @property
    def gathered(self) -> float:
        """Bytes of a gathered parameter of a layer."""
        if self.in_place:
            return 0.0
        own = 1.0 if self.assumed.habits.gathers_fp8 else self.stored
        return (self.shape.frozen_matrix_bytes if self.shape.lora else 0) or own

    @property
    def reduced(self) -> float:
        """Bytes of a gradient in its reduction."""
        if self.in_place:
            return 0.0
        return self.own if self.assumed.fp32_gradients else float(self.compute)

    @cached_property
    def summed(self) -> float:
        """Bytes of a gradient that waits for the step. Whole parameters have gradients of their
        precision, and 32-bit copies beside them. FSDP2 keeps the buffers in which copies of a shard
        add up gradients until the end of a backward pass (``AllReduceState``)."""
        if self.on_host == "gradients" or (
            self.on_host == "all" and self.layout.sharding != "hybrid"
        ):
            return 0.0
        if self.layout.shards_parameters or self.assumed.fp32_gradients:
            return self.own
        return min(self.own, self.compute)

    @cached_property
    def trained(self) -> float:
        """Share of a layer's parameters that are trained."""
        shape = self.shape
        if shape.lora is None:
            return 1.0
        return shape.adapter_parameters(moe=bool(shape.experts)) / shape.layer_parameters()

    @property
    def trained_root(self) -> float:
        """Share of the parameters around the layers that are trained."""
        return 1.0 if self.shape.lora is None else 0.0

    @cached_property
    def graded(self) -> float:
        """Share of a layer's parameters that have a gradient. A flat parameter of which a part is
        trained has one of its whole size."""
        flat = self.assumed.habits.flat_adapters and self.layout.shards_parameters
        return 1.0 if flat else self.trained

    @cached_property
    def layer(self) -> _Layers:
        """Each kind of layer counts with its number in the stage; the largest makes the peaks."""
        shape, tensor, expert = self.shape, self.layout.tensor, self.layout.expert
        if not shape.pattern:
            whole, experts = _layer(shape, tensor, expert)
            return _Layers(whole, experts, whole)
        kinds = kinds_of_stages(shape, self.layout)[self.stage]
        each = [(count, *_layer(kind, tensor, expert)) for kind, count in kinds.items()]
        return _Layers(
            sum([count * whole for count, whole, _ in each]) / self.layers,
            sum([count * experts for count, _, experts in each]) / self.layers,
            max([whole for _, whole, _ in each]),
        )

    @cached_property
    def replicas(self) -> int:
        """Ranks that have the same experts."""
        return max(1, self.layout.copies // self.layout.expert)

    def share(self, ranks: int) -> float:
        """Return a rank's share of a layer over ``ranks``. Fewer of them share the experts."""
        layer = self.layer
        dense = layer.mean - layer.experts
        return dense / ranks + layer.experts / max(1, ranks // self.layout.expert)

    @cached_property
    def summing(self) -> int:
        """Ranks that shard the gradients, which ZeRO-1 does not."""
        return 1 if self.layout.sharding == "optimizer" else self.layout.shards

    @cached_property
    def summed_layer(self) -> float:
        """Bytes of the gradients of one layer that wait for the step."""
        return self.summed * self.share(self.summing) * self.graded

    @cached_property
    def root(self) -> float:
        """Parameters around the layers."""
        return self.embedding + (0.0 if self.shape.tied and self.first else self.head)

    @property
    def largest_unit(self) -> float:
        """Most parameters that are gathered at once: of a layer, or of all around the layers."""
        whole, _ = _layer(self.shape, self.layout.tensor, self.layout.expert)
        return max(self.root, whole)

    @cached_property
    def updated(self) -> float:
        """Bytes of the shards of all trained parameters."""
        shards = self.layout.shards
        layers = self.layers * self.share(shards) * self.trained
        return self.own * (layers + self.root * self.trained_root / shards)

    @cached_property
    def gradients(self) -> float:
        """Bytes of all gradients when the step begins."""
        if self.on_host == "all":
            return 0.0
        root = self.summed * self.root * self.trained_root / self.summing
        return self.layers * self.summed_layer + root

    @cached_property
    def accumulated(self) -> float:
        """Bytes of the gradients that earlier micro-batches of a step have left."""
        habits = self.assumed.habits
        whole = self.layers * self.layer.mean * self.graded + self.root * self.trained_root
        if keeps_stage(self.layout):
            return self.reduced * whole
        if self.layout.grad_accumulation == 1:
            return 0.0
        if habits.whole_gradients and self.layout.shards_parameters:
            return (4.0 if habits.wide_sums else self.stored) * whole
        return self.gradients

    @cached_property
    def keeps_gathered(self) -> bool:
        """Whether layers stay gathered between their forward and backward pass."""
        keeps = self.assumed.habits.keeps_gathered and self.layout.shards_parameters
        return keeps or keeps_stage(self.layout)

    @cached_property
    def gathered_layer(self) -> float:
        """Bytes of a layer that stays gathered. Experts without another copy of them are used where
        they are, if they need no cast."""
        in_place = self.replicas == 1 and not self.cast
        return self.gathered * (self.layer.mean - (self.layer.experts if in_place else 0.0))

    @cached_property
    def kept(self) -> float:
        """Bytes of the activations that the mean layer keeps for a micro-batch."""
        return mean_activations(self.shape, self.layout, self.assumed, self.stage) * self.tokens

    @cached_property
    def stream(self) -> float:
        """Bytes of the residual streams of a micro-batch on this rank."""
        split = self.layout.tensor if self.layout.sequence_parallel else 1
        return self.compute * residual(self.shape) / split * self.tokens

    @property
    def logit_count(self) -> float:
        """Number of this rank's logits that exist at once."""
        if not self.last:
            return 0.0
        shape, assumed = self.shape, self.assumed
        predicted = self.tokens
        if shape.target_len:
            predicted *= shape.target_len / shape.seq_len
        ranks = 1 if assumed.habits.gathers_logits else self.layout.tensor
        return predicted * shape.vocab / (assumed.loss_chunks * ranks)

    @property
    def freed_logits(self) -> float:
        """Bytes of the block of 16-bit logits that PyTorch's loss copies to 32 bits. It is free at
        the loss's peak, but too small for the other tensors of the loss."""
        copied = not self.assumed.fused_loss and self.assumed.loss_bytes is None
        return self.compute * self.logit_count if copied and self.compute < 4 else 0.0


def _phases(rank: Rank) -> Iterator[Phase]:
    """Yield the phases of a step in their order; the optimizer's is the last one."""
    resident = 0.0 if rank.in_place else rank.stored * rank.root
    stays = rank.layers * rank.gathered_layer if rank.keeps_gathered else 0.0
    yield from _loss_phases(rank, resident + stays)
    yield from _layer_phases(rank, resident + stays)
    if not keeps_stage(rank.layout):
        stays = 0.0
    yield from _last_phases(rank, resident + stays)
    yield _step_phase(rank)


def _loss_phases(rank: Rank, resident: float) -> Iterator[Phase]:
    """Yield the loss, and the output layer's backward pass with its gradient and that of the
    logits. ``resident``: bytes of parameters that stay gathered."""
    layout, assumed, compute = rank.layout, rank.assumed, rank.compute
    activations = rank.layers * rank.kept
    if rank.last:
        # Inputs of the last norm and of the output layer, which tensor ranks gather.
        split = layout.tensor if layout.sequence_parallel else 1
        width = rank.shape.hidden / split + rank.shape.hidden
        activations += (4 if assumed.habits.wide_rest else compute) * width * rank.tokens
    yield Phase(rank.accumulated, activations, _loss(layout, assumed) * rank.logit_count, resident)
    ahead = 0.0 if rank.keeps_gathered else rank.gathered * rank.layer.largest
    yield Phase(
        rank.accumulated,
        activations + rank.stream,
        compute * rank.logit_count,
        resident + compute * rank.head * rank.trained_root + ahead,
    )


def _layer_phases(rank: Rank, resident: float) -> Iterator[Phase]:
    """Yield the backward passes of the first layers to run and of the last ones."""
    shape, layout, compute, layers = rank.shape, rank.layout, rank.compute, rank.layers
    gathered = 0.0 if rank.keeps_gathered else rank.gathered * rank.layer.largest
    released = rank.gathered_layer if rank.keeps_gathered and not keeps_stage(layout) else 0.0
    recomputed = rank.stream if layout.recompute == "full" else 0.0
    working = max(
        _inside(rank) + (rank.kept - recomputed if recomputed else 0.0),
        5 * rank.stream + compute * rank.layer.largest * rank.graded,
    )
    frozen = shape.lora is not None and layout.shards_parameters
    left = 2 * recomputed if frozen and rank.assumed.habits.keeps_inputs else 0.0
    for done in {0, min(1, layers - 1), max(0, layers - 2), layers - 1}:
        units = resident - done * released + compute * rank.head * rank.trained_root + gathered
        # XLA gathers in the loop over the layers, and not ahead.
        if done < layers - 1 and not rank.assumed.habits.placed:
            units += gathered
        if done:
            units += rank.reduced * rank.layer.largest * rank.graded
        yield Phase(
            rank.accumulated or done * rank.summed_layer,
            (layers - 1 - done) * rank.kept + done * left,
            0.0,
            units,
            working,
        )


def _inside(rank: Rank) -> float:
    """Return the bytes of a layer's tensors during its MLP's backward pass: two more of the widest
    ones, a product's gradients."""
    shape, layout, compute = rank.shape, rank.layout, rank.compute
    whole = rank.kept
    if layout.recompute != "none" or shape.pattern:
        whole = largest_layer(rank) * rank.tokens
    width = shape.ffn_hidden / layout.tensor
    widest = compute * (2 if shape.gated else 1) * width
    if rank.assumed.habits.overwrites_mlp:
        widest = 0.0
    widest = max(widest, routed_gradients(shape, layout, rank.assumed))
    inside = whole + widest * rank.tokens + rank.stream + _empty(rank)
    # A matrix's gradient, or a frozen matrix of 4 bits as its product needs it.
    if shape.lora is None or shape.lora.expands:
        inside += compute * width * shape.hidden
    return inside


def _empty(rank: Rank) -> float:
    """Return the bytes of a layer's tensors for copies of tokens that do not arrive (see
    `Assumptions.room_for_all`): what a layer and its backward pass hold of those that do, and the
    tokens as they arrive, sorted by rank. One that is sent once arrives once, and so does the
    gradient that returns."""
    shape, layout, assumed = rank.shape, rank.layout, rank.assumed
    empty = assumed.empty(shape, layout)
    if not empty:
        return 0.0
    each = routed_activations(shape, layout, assumed) + routed_gradients(shape, layout, assumed)
    arriving = float(rank.compute * shape.expert_width * shape.experts_per_token)
    if assumed.sends_copies is False:
        arriving = 2 * arriving / shape.experts_per_token - arriving
    return empty * (each + arriving) / shape.experts_per_token * rank.tokens


def _last_phases(rank: Rank, resident: float) -> Iterator[Phase]:
    """Yield the end of the backward pass: the gradients of the embedding and the output layer are
    scattered last."""
    gradients = rank.accumulated or rank.layers * rank.summed_layer
    yield Phase(gradients, gathered=resident + rank.reduced * rank.trained_root * rank.root)
    tied = rank.compute * (3 if rank.shape.tied else 2) * rank.trained_root
    yield Phase(
        gradients,
        gathered=resident + rank.reduced * rank.layer.largest * rank.graded,
        temporary=tied * rank.head + rank.stream,
    )


def _step_phase(rank: Rank) -> Phase:
    """Return the optimizer's update, which works on copies of all shards (foreach), or of more than
    these, or on two of one shard; on none, if it is on the host."""
    if rank.layout.offload:
        return Phase(rank.gradients)
    shards = rank.layout.shards
    copies = rank.updated
    if rank.assumed.habits.fused_adam:
        copies = 0.0
    elif not rank.assumed.habits.foreach:
        copies = min(copies, 8 * max(rank.share(shards), rank.root / shards))
    copies = max(copies, rank.updated * rank.assumed.step_copies / 4)
    return Phase(rank.gradients, temporary=copies)


def _loss(layout: Layout, assumed: Assumptions) -> float:
    """Return the bytes for each of a rank's logits at the loss's peak. Fused: the logits, which
    their gradient overwrites."""
    if assumed.fused_loss:
        return float(BYTES[assumed.precision])
    split = layout.tensor > 1 and not assumed.habits.gathers_logits
    own = SPLIT_LOSS if split and backend_of(layout).torch_kernels else LOSS
    if compiled := assumed.loss_bytes == COMPILED_LOSS:
        own = SPLIT_COMPILED_LOSS if split else COMPILED_LOSS
    elif assumed.loss_bytes:
        own = assumed.loss_bytes
    # A compiled loss does not copy the logits to 32 bits.
    held = BYTES[assumed.precision] if compiled else 4
    return own + (held if assumed.habits.holds_outputs else 0)


@lru_cache(maxsize=4096)
def _layer(shape: Shape, tensor: int, expert: int) -> tuple[float, float]:
    """Parameters of one layer on one tensor and expert rank, and of its experts alone."""
    every = shape.experts * shape.expert_parameters
    held = every / expert
    return (shape.layer_parameters() - every + held) / tensor, held / tensor
