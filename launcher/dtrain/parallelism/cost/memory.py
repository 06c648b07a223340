"""Memory of the fullest GPU in training, by part."""

from __future__ import annotations

from functools import lru_cache

from dtrain.parallelism.assumptions import Assumptions
from dtrain.parallelism.backends import backend_of
from dtrain.parallelism.cluster.hardware import GIB
from dtrain.parallelism.cost.activations import (
    largest_layer,
    mean_activations,
    routed_activations,
    routed_gradients,
    score_activations,
)
from dtrain.parallelism.cost.products import tokens
from dtrain.parallelism.cost.runtime_memory import Stage
from dtrain.parallelism.cost.runtime_phases import highest_phase
from dtrain.parallelism.cost.sharded_memory import Phase, Rank, peak
from dtrain.parallelism.cost.stages import (
    StageRank,
    extreme_stages,
    fullest_stage,
    in_flight,
    layers_of_stage,
)
from dtrain.parallelism.cost.states import StageStates, stage_states
from dtrain.parallelism.model.shape import Shape, residual
from dtrain.records import dataclass
from dtrain.runtime.layout import Layout

FRAGMENTATION = 0.03
FRAGMENTATION_BY_TORCH = 0.07
"""Memory that the allocator reserves but does not use, as a share of the used memory: 0 to 0.09 in
published runs, highest with shards or flat copies of many sizes."""
SPLIT_BLOCK = 4.0
GATHER_BUFFERS = 4.0
"""Bytes for each logit that the allocator has cached while whole logits are kept in two buffers
(see `MemoryHabits.gathers_logits`). It splits a block of 32-bit logits for 16-bit ones that are
kept, so the next 32-bit ones need a new block. PyTorch's all-gather into a list needs the list and
a flat copy, 2 bytes each, whose blocks are too small for 32-bit logits. A simulation of the
allocator with LLaMA's tensors gave 4 to 5 bytes on one rank, and 6 to 9 on several."""

LAYERS_AHEAD = 40
"""Layers whose forward pass a host can start before the GPU is there: a stream takes about 1,000
kernels before a launch waits (stackoverflow.com/questions/53970187), and a layer has 24."""


@dataclass(frozen=True, slots=True)
class Memory:
    """GiB on one GPU at the peak of a step."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    gathered: float
    """Gathered layers, and gradients before they are scattered."""
    temporary: float
    """Temporary tensors of one layer's backward pass."""
    communication: float
    context: float
    fragmentation: float
    cached: float = 0.0
    """Blocks that the allocator keeps for later, and frees if memory is short. Not in the total."""

    @property
    def total(self) -> float:
        """Total as the driver counts it, without cached blocks: what the layout needs."""
        return self.allocated + self.communication + self.context + self.fragmentation

    @property
    def allocated(self) -> float:
        """Total as PyTorch's allocator counts it."""
        return (
            self.parameters + self.gradients + self.optimizer + self.activations + self.logits
            + self.gathered + self.temporary
        )  # fmt: skip


def memory(shape: Shape, layout: Layout, assumed: Assumptions) -> Memory:
    """Return the memory of the fullest GPU, over all stages of the pipeline."""
    stages = extreme_stages(shape, layout, assumed)
    every = (stage_memory(shape, layout, assumed, stage) for stage in stages)
    return max(every, key=lambda m: m.total)


def least_memory(shape: Shape, layout: Layout, assumed: Assumptions) -> float:
    """Return the GiB of the `fullest_stage`, a lower limit of the memory."""
    return stage_memory(shape, layout, assumed, fullest_stage(shape, layout)).total


# A plan searches the same layouts several times, to compare its choice with others.
@lru_cache(maxsize=1 << 16)
def stage_memory(shape: Shape, layout: Layout, assumed: Assumptions, stage: int) -> Memory:
    """Return the memory of a GPU of one stage of the pipeline."""
    layers = layers_of_stage(shape, layout, assumed, stage)
    if backend_of(layout).runtime_memory:
        return _by_runtime(Stage(shape, layout, assumed, stage, layers, in_flight(layout, stage)))
    rank = Rank(shape, layout, assumed, stage, layers)
    states = stage_states(shape, layout, assumed, stage)
    held = in_flight(layout, stage, hides_exchange=assumed.hides_exchange)
    if assumed.by_torch(layout):
        phase, cached = peak(rank, held)
    else:
        phase, cached = _whole_peak(rank, states, held), _waiting_tensors(rank)
    used = states.parameters + states.optimizer + sum(phase)
    unused = _unused_share(layout, assumed) * used + _split_blocks(rank)
    return _in_gib(rank, phase, states.parameters, states.optimizer, unused, cached)


def _in_gib(
    rank: StageRank,
    phase: Phase,
    parameters: float,
    optimizer: float,
    unused: float,
    cached: float = 0.0,
) -> Memory:
    """The memory of a rank in its highest phase, from bytes. ``unused``: by the allocator."""
    assumed = rank.assumed
    communicators = assumed.communicator * _communicators(rank.layout, assumed)
    gradients, activations, logits, gathered, temporary = phase
    return Memory(
        parameters=parameters / GIB,
        gradients=gradients / GIB,
        optimizer=optimizer / GIB,
        activations=activations / GIB,
        logits=logits / GIB,
        gathered=gathered / GIB,
        temporary=temporary / GIB,
        communication=communicators + assumed.habits.buckets,
        context=assumed.habits.context,
        fragmentation=unused / GIB,
        cached=cached / GIB,
    )


def least_activations(shape: Shape, layout: Layout, assumed: Assumptions) -> float:
    """Return the GiB that the `fullest_stage` keeps for its backward passes, a lower limit of its
    memory; 0 for the runtime, whose formulas have other terms."""
    if backend_of(layout).runtime_memory:
        return 0.0
    stage = fullest_stage(shape, layout)
    layers = layers_of_stage(shape, layout, assumed, stage)
    kept = layers * mean_activations(shape, layout, assumed, stage)
    # Rounding must not lift the limit above the memory.
    return kept * tokens(shape, layout) * in_flight(layout, stage) * (1 - 1e-9) / GIB


def lasting_states(shape: Shape, layout: Layout, assumed: Assumptions) -> float:
    """Return the GiB of the weights and moments on a GPU of the `fullest_stage`. Added to
    `least_activations`, they are a lower limit of its memory."""
    stage = fullest_stage(shape, layout)
    if backend_of(layout).runtime_memory:
        layers = layers_of_stage(shape, layout, assumed, stage)
        rank = Stage(shape, layout, assumed, stage, layers, 1)
        lasting = rank.weights + rank.moments
    else:
        states = stage_states(shape, layout, assumed, stage)
        lasting = states.parameters + states.optimizer
    return lasting * (1 - 1e-9) / GIB


def _communicators(layout: Layout, assumed: Assumptions) -> int:
    """Return the number of communicators of a rank: one for each kind of parallelism, and two
    for hybrid sharding.

    Megatron-LM has two more: of all ranks, and of the ranks that share a model, for the gradients'
    norm (``parallel_state.py``). Experts have two more: the ranks that exchange tokens gather
    their numbers in another (``tp_ep_group``), and all replicas of a stage sum them for the router
    (``tp_dp_cp_group``). Replicas of experts have one. With tensor, pipeline and data 2 on H100s,
    suspending all of them freed 7 GB, and 9.5 with experts (verl pull request 6408). That is more
    than these take: sends and exchanges have buffers of their own.
    """
    model = layout.tensor * layout.pipeline > 1
    count = (layout.tensor > 1) + (layout.pipeline > 1) + (layout.context > 1)
    count += (layout.expert > 1) + (layout.data * layout.context > 1)
    count += layout.sharding == "hybrid"
    if not count or layout.backend != "megatron" or assumed.habits.placed:
        return count
    experts = 2 * (layout.expert > 1) + (layout.copies > layout.expert > 1)
    return count + 1 + model + experts


def _whole_peak(rank: Rank, states: StageStates, held: float) -> Phase:
    """Return the highest phase with whole parameters, as in Megatron-LM: the first backward pass,
    or the step, which comes when the activations are gone."""
    shape, layout, assumed = rank.shape, rank.layout, rank.assumed
    kept = rank.layers * rank.kept
    if assumed.habits.keeps_outputs and not rank.last:
        kept += rank.compute * residual(shape) * rank.tokens
    widest = shape.hidden * shape.ffn_hidden * (2 if shape.gated else 1) / layout.tensor
    # A matrix's gradient in 16 and 32 bits; or a frozen matrix of 4 bits, as the product needs it.
    temporary = 6.0 * widest if shape.lora is None else 2.0 * widest * shape.lora.expands
    if layout.recompute == "full":
        # The layer in its backward pass holds all of its activations, and gradients of some.
        again = largest_layer(rank)
        again += _activation_gradients(rank)
        # All copies that tokens send to the rank with most of them, and their gradients.
        above = assumed.busiest(shape, layout) - 1
        if above:
            copies = routed_activations(shape, layout, assumed)
            again += above * (copies + routed_gradients(shape, layout, assumed))
        temporary = max(temporary, again * rank.tokens)
    elif assumed.flash_attention:
        # So does the one without recomputation. In stages of several layers or micro-batches, the
        # activations that are kept for later take more than the gradients.
        again = rank.kept
        if layout.recompute == "none":
            again = max(again, largest_layer(rank) * rank.tokens)
        again += _activation_gradients(rank) * rank.tokens
        temporary = max(temporary, again - kept * held)
    else:
        # Attention in its backward pass has its scores, kept or computed again, and gradients.
        again = _activation_gradients(rank)
        if layout.recompute == "selective":
            again += score_activations(rank)
        temporary = max(temporary, again * rank.tokens)
    backward = Phase(states.gradients, kept * held, _loss_bytes(rank), temporary=temporary)
    return max(backward, Phase(states.gradients, temporary=states.step), key=sum)


def _loss_bytes(rank: Rank) -> float:
    """Bytes of a micro-batch's logits and their gradient in 32 bits. Megatron-LM's cross-entropy
    works in place on a copy; PyTorch's kernels keep three copies."""
    assumed = rank.assumed
    own = 12.0 if assumed.habits.unfused else rank.compute + 4.0
    each = rank.compute if assumed.fused_loss else assumed.loss_bytes or own
    if assumed.habits.gathers_logits:
        each += rank.compute * min(2, rank.layout.grad_accumulation)
    return each * rank.logit_count


def _unused_share(layout: Layout, assumed: Assumptions) -> float:
    """Memory that the allocator reserves but does not use, as a share of the used memory."""
    habits = assumed.habits
    if habits.placed:
        return 0.0
    # States of 16 bits that stay in place are not copied between shards, sums and products.
    copied = layout.shards_parameters or not assumed.narrow_states
    flat = habits.step_copies or habits.frees_gradients
    # With segments of a fixed size, `peak` has the blocks that differ in size.
    many_sizes = flat or (copied and assumed.by_torch(layout) and not habits.fixed_segments)
    return FRAGMENTATION_BY_TORCH if many_sizes else FRAGMENTATION


def _waiting_tensors(rank: Rank) -> float:
    """Bytes of tensors that the host has freed and the GPU still exchanges between tensor ranks.

    In a layer, sequence parallelism gathers the residual stream twice, and scatters two sums of its
    size; otherwise two of it are added up. Megatron-LM waits for the GPU when a piece of a stage is
    done (``batch_p2p_sync``). If memory is short, the allocator waits, too.
    """
    layout = rank.layout
    if layout.tensor == 1 or not rank.assumed.habits.records_streams:
        return 0.0
    each = rank.compute * rank.shape.hidden * rank.tokens
    ahead = min(rank.layers / layout.virtual_pipeline, LAYERS_AHEAD)
    return (4 if layout.sequence_parallel else 2) * each * ahead


def _split_blocks(rank: Rank) -> float:
    """Bytes that the allocator loses because kept logits split its blocks; `peak` has those of
    sharded memory."""
    layout, assumed = rank.layout, rank.assumed
    if not (assumed.habits.gathers_logits and rank.last) or assumed.by_torch(layout):
        return 0.0
    each = SPLIT_BLOCK + (GATHER_BUFFERS if layout.tensor > 1 else 0.0)
    return each * rank.tokens * rank.shape.vocab


def _activation_gradients(rank: Rank) -> float:
    """Bytes per token of the largest gradients that a layer's backward pass holds at once: of a
    kernel's output and input in the MLP or over the score matrix, and of the residual streams."""
    shape, layout, assumed = rank.shape, rank.layout, rank.assumed
    scores = 0 if assumed.flash_attention else shape.heads * shape.seq_len
    widest = max(2 * scores, (2 if shape.gated else 1) * shape.ffn_hidden)
    split = layout.tensor if layout.sequence_parallel else 1
    streams = 2 * residual(shape) / split
    own = rank.compute * (widest / layout.tensor + streams)
    routed = routed_gradients(shape, layout, assumed)
    return max(own, routed + rank.compute * streams)


def _by_runtime(stage: Stage) -> Memory:
    phase = highest_phase(stage)
    used = sum(phase) + stage.weights + stage.moments
    return _in_gib(stage, phase, stage.weights, stage.moments, FRAGMENTATION_BY_TORCH * used)
