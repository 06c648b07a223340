"""The time of one optimizer step, by part."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import lru_cache
from typing import NamedTuple

from dtrain.parallelism.assumptions import Assumptions
from dtrain.parallelism.backends import backend_of
from dtrain.parallelism.cluster.efficiency import OVERLAPPED, Efficiency
from dtrain.parallelism.cluster.hardware import GpuCluster
from dtrain.parallelism.cost.collectives import Group, exposed
from dtrain.parallelism.cost.data_parallel import PCIE, DataRanks, between_steps
from dtrain.parallelism.cost.launches import COMPUTED, RECOMPUTED, launches
from dtrain.parallelism.cost.launches import kernels as kernels_of
from dtrain.parallelism.cost.layer import BYTES, Kernels
from dtrain.parallelism.cost.runtime_layer import runtime_layer
from dtrain.parallelism.cost.stages import kinds_of_stages, stage_layers
from dtrain.parallelism.model.shape import Shape, residual
from dtrain.records import changed, dataclass
from dtrain.runtime.layout import Layout

LAUNCHES = 100
"""Approximate number of kernels of one micro-batch outside of the layers."""
SLOWEST_HOST = 0.15
"""Growth of the fixed costs of a step with the logarithm of the number of hosts: all wait for the
slowest, and the longest of n delays at random grows with ln n. Chosen for tables of one model on 8
to 256 hosts (dgxc-benchmarking, llm-foundry)."""
BUBBLE = {"zb-1p": 1 / 3, "zb-2p": 0.0, "zb-v": 0.0}
"""Shares of 1F1B's bubble (Zero Bubble Pipeline Parallelism, arXiv 2401.10241)."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one optimizer step on the critical path."""

    compute: float
    recompute: float
    tensor: float
    context: float
    expert: float
    pipeline: float
    """Sending activations between stages."""
    bubble: float
    """Waiting for other stages."""
    data: float
    """Gathering parameters and reducing gradients, without the part hidden by computation."""
    optimizer: float
    host: float
    """Waiting for the host: to start kernels, and to copy offloaded activations."""
    other: float
    """Fixed costs of every step: data loading, logging, the reduction of the loss."""

    @property
    def total(self) -> float:
        return (
            self.compute + self.recompute + self.tensor + self.context + self.expert
            + self.pipeline + self.bubble + self.data + self.optimizer + self.host + self.other
        )  # fmt: skip

    def times(self, factor: float) -> StepTime:
        """Each part takes ``factor`` times as long."""
        return StepTime(*(getattr(self, part.name) * factor for part in fields(self)))


class _Layer(NamedTuple):
    """Seconds that one layer and micro-batch take, by part."""

    compute: float
    recompute: float
    tensor: float
    context: float
    expert: float
    head: float
    """Of the output layer and the loss, which only the last stage has."""
    launches: float
    """Kernels that the host starts."""
    stalled: float
    """Kernels that the host starts in layers with experts."""

    @property
    def total(self) -> float:
        return self.compute + self.recompute + self.tensor + self.context + self.expert


class _Stage(NamedTuple):
    """Seconds that one micro-batch takes in a pipeline stage."""

    layers: int
    layer: _Layer
    """One of the ``layers``; of different ones, which count as one, their sum."""
    waiting: float
    """For the host."""
    busy: float
    """All of it."""


def step_time(
    shape: Shape, layout: Layout, cluster: GpuCluster, efficiency: Efficiency, assumed: Assumptions
) -> StepTime:
    """Return the time of one step of ``layout.global_batch`` sequences."""
    kernels = Kernels(efficiency, cluster, shape, layout, assumed)
    head = _layer(kernels).head
    m, p = layout.grad_accumulation, layout.pipeline

    stages = [*_stages(kernels, p, layout.virtual_pipeline)]
    stages[-1] = _stage(kernels, stages[-1].layers, stages[-1].layer, head)
    busy = [stage.busy for stage in stages]
    slowest = busy.index(max(busy))
    layers, layer, *_ = stages[slowest]
    # All stages wait for the slowest one, and at both ends of the step for all other stages:
    # (p−1)/v of a micro-batch if stages are equal (SC21, arXiv 2104.04473, section 2.2).
    bubble = _wait(layout) * (sum(busy) - busy[slowest])

    sends, beside = _sends(kernels, busy[slowest])
    ranks = between_steps(DataRanks(efficiency, cluster, shape, layout, assumed))
    return StepTime(
        compute=m * (layers * layer.compute + (head if slowest == p - 1 else 0.0)),
        recompute=m * layers * layer.recompute,
        tensor=m * layers * layer.tensor,
        context=m * layers * layer.context,
        expert=m * layers * layer.expert,
        pipeline=sends,
        bubble=bubble,
        data=ranks.exposed(m * busy[slowest] - beside),
        optimizer=ranks.optimizer,
        host=m * (stages[slowest].waiting + _copies_to_host(kernels, slowest)),
        other=efficiency.fixed * (1 + SLOWEST_HOST * math.log(cluster.hosts)),
    )


def least_time(
    shape: Shape, layout: Layout, cluster: GpuCluster, efficiency: Efficiency, assumed: Assumptions
) -> float:
    """Return a lower limit of the time of a step: its layers in the pipeline, and nothing else."""
    kernels = Kernels(efficiency, cluster, shape, layout, assumed)
    every, most = _busy(kernels, layout.pipeline, layout.virtual_pipeline)
    return layout.grad_accumulation * most + _wait(layout) * (every - most)


def even_time(
    shape: Shape, layout: Layout, cluster: GpuCluster, efficiency: Efficiency, assumed: Assumptions
) -> float:
    """Return a lower limit of `least_time`: that of stages that take equally long."""
    every, p = _every_layer(Kernels(efficiency, cluster, shape, layout, assumed)), layout.pipeline
    # Rounding must not lift the limit above the time.
    return every / p * (layout.grad_accumulation + _wait(layout) * (p - 1)) * (1 - 1e-9)


def time_with_data(
    shape: Shape, layout: Layout, cluster: GpuCluster, efficiency: Efficiency, assumed: Assumptions
) -> float:
    """Return a lower limit of the time of a step, from `even_time` and the exchanges between data
    ranks, which take most of a step if the network is slow."""
    kernels = Kernels(efficiency, cluster, shape, layout, assumed)
    busy = layout.grad_accumulation * _every_layer(kernels) / layout.pipeline
    ranks = between_steps(DataRanks(efficiency, cluster, shape, layout, assumed))
    # The longer the slowest stage computes, the more it hides, but never as much as it takes.
    bubble = _wait(layout) * (layout.pipeline - 1) * busy / layout.grad_accumulation
    hidden = busy + ranks.exposed(busy)
    shared = busy + bubble + ranks.late + ranks.share * ranks.traffic
    return (max(hidden, shared) + ranks.optimizer) * (1 - 1e-9)


def _wait(layout: Layout) -> float:
    """Return the share of the other stages' micro-batch for which the slowest stage waits."""
    return BUBBLE.get(layout.schedule, 1.0) / layout.virtual_pipeline


def _waiting(kernels: Kernels, stage: float, layers: int, layer: _Layer) -> float:
    """Seconds that the GPU waits for the host in one micro-batch, in a stage of these ``layers``
    that computes for ``stage`` seconds: if kernels are shorter than their launches, the host is the
    bottleneck.

    Layers with experts need on the host how many tokens arrive. Until it knows, it cannot start
    kernels ahead of time, and the GPU waits for some of the ``stalled`` ones.
    """
    efficiency = kernels.efficiency
    if kernels.assumed.one_graph:
        return 0.0
    host = (layers * layer.launches + LAUNCHES) * efficiency.launch
    if kernels.assumed.blocking:
        return host
    return max(0.0, host - stage, layers * layer.stalled * efficiency.launch * efficiency.stalls)


@lru_cache(maxsize=1 << 14)
def _stages(kernels: Kernels, pipeline: int, virtual_pipeline: int) -> tuple[_Stage, ...]:
    """Return the stages, the last one without the output layer. The numbers of stages and pieces
    are those of the layout, in which equal kernels may differ."""
    shape, layout = kernels.shape, kernels.layout
    if not shape.pattern:
        counts, layer = stage_layers(shape, layout), _layer(kernels)
        of_count = {count: _stage(kernels, count, layer) for count in set(counts)}
        return tuple([of_count[count] for count in counts])
    each = _layer_of_kinds(kernels)
    found: dict[tuple[tuple[Shape, int], ...], _Stage] = {}
    every = [tuple(kinds.items()) for kinds in kinds_of_stages(shape, layout)]
    for kinds in set(every):
        layer = _summed([(each[kind], count) for kind, count in kinds])
        found[kinds] = _stage(kernels, 1, layer)
    return tuple([found[kinds] for kinds in every])


def _stage(kernels: Kernels, layers: int, layer: _Layer, head: float = 0.0) -> _Stage:
    """``head``: seconds of the output layer."""
    computing = layers * layer.total + head
    waiting = _waiting(kernels, computing, layers, layer)
    return _Stage(layers, layer, waiting, computing + waiting)


def _summed(layers: Iterable[tuple[_Layer, int]]) -> _Layer:
    """Return what several layers take, each as often as its number says."""
    sums = [0.0] * len(_Layer._fields)
    for layer, count in layers:
        for place, value in enumerate(layer):
            sums[place] += count * value
    return _Layer(*sums)


@lru_cache(maxsize=1 << 14)
def _busy(kernels: Kernels, pipeline: int, virtual_pipeline: int) -> tuple[float, float]:
    """Seconds of a micro-batch in all `_stages`, and in the slowest one."""
    busy = [stage.busy for stage in _stages(kernels, pipeline, virtual_pipeline)]
    return sum(busy), max(busy)


@lru_cache(maxsize=1 << 14)
def _every_layer(kernels: Kernels) -> float:
    """Seconds that the GPUs of all stages compute one micro-batch, without the output layer."""
    shape = kernels.shape
    if not shape.pattern:
        return shape.layers * _layer(kernels).total
    each = _layer_of_kinds(kernels)
    return sum(count * each[kind].total for kind, count in shape.kinds)


@lru_cache(maxsize=1 << 14)
def _layer_of_kinds(kernels: Kernels) -> dict[Shape, _Layer]:
    one = kernels
    return {
        # `replace` takes three times as long.
        kind: _layer(Kernels(one.efficiency, one.cluster, kind, one.layout, one.assumed))
        for kind, _ in one.shape.kinds
    }


@lru_cache(maxsize=1 << 14)
def _layer(kernels: Kernels) -> _Layer:
    shape, assumed = kernels.shape, kernels.assumed
    moe = shape.moe_layers / shape.layers
    layout = changed(kernels.layout, recompute="none")
    passes, head = _passes(Kernels(kernels.efficiency, kernels.cluster, shape, layout, assumed))
    gaps = kernels.efficiency.gap * kernels_of(shape, kernels.layout, assumed)
    compute = passes + assumed.idle + COMPUTED * gaps
    exchange = moe * _expert(kernels) if moe else 0.0
    if assumed.hides_exchange:
        exchange = exposed(exchange, compute, OVERLAPPED)
    started = launches(shape, kernels.layout, assumed)
    return _Layer(
        compute=compute,
        recompute=_mean(shape, kernels.recompute) + RECOMPUTED[kernels.layout.recompute] * gaps,
        tensor=_tensor(kernels),
        context=_context(kernels),
        expert=exchange,
        head=head,
        launches=started,
        stalled=0.0 if assumed.capacity else moe * started,
    )


@lru_cache(maxsize=1 << 14)
def _passes(kernels: Kernels) -> tuple[float, float]:
    """Seconds of the forward and the backward pass, of a layer and of the output layer: the same
    with and without recomputation."""
    layer = _mean(kernels.shape, kernels.forward) + _mean(kernels.shape, kernels.backward)
    return layer, kernels.head_forward() + kernels.head_backward()


def _mean(shape: Shape, cost: Callable[..., float]) -> float:
    """Return the mean ``cost`` of layers with and without experts."""
    moe = shape.moe_layers / shape.layers
    dense = cost(moe=False) if moe < 1 else 0.0
    return (1 - moe) * dense + (moe * cost(moe=True) if moe else 0.0)


def _copies_to_host(kernels: Kernels, stage: int) -> float:
    """Seconds that one micro-batch waits for its activations to reach host memory and return.

    `dtrain.runtime` copies them one after the other while nothing else computes. Split tensors stay
    on the GPU.
    """
    layout = kernels.layout
    if not layout.offload_activations or layout.tensor > 1:
        return 0.0
    layer = runtime_layer(kernels.shape, layout, kernels.assumed)
    layers = stage_layers(kernels.shape, layout)[stage]
    return 2 * layers * layer.saved("none") / PCIE


def _activation(kernels: Kernels, width: int) -> float:
    """Bytes of one activation of one micro-batch with ``width`` elements for each token: 2·s·b·h,
    over the context ranks."""
    return BYTES[kernels.assumed.precision] * kernels.tokens * width


def _routed(kernels: Kernels) -> float:
    """Bytes of the tokens of one micro-batch as experts read them."""
    return _activation(kernels, kernels.shape.expert_width)


def _tensor(kernels: Kernels) -> float:
    """Two all-reduces for each sum of a layer with the residual stream, or as many gathers and
    scatters when the sequence is split.

    The backward pass of a split sequence gathers its inputs once more (RAR, arXiv 2205.05198,
    section 4.2.2), which overlaps with computation. Recomputation repeats the forward's.

    Experts take their tokens from the split sequence, so layers of whole experts need no sum of
    their own. If tensor ranks hold parts of each expert, they gather the tokens after they were
    sent to experts: ``experts_per_token`` copies, beside no product that could hide them.
    """
    layout = kernels.layout
    if layout.tensor == 1:
        return 0.0
    group = Group(kernels.cluster, kernels.efficiency, layout.tensor, 1)
    shape, passes = kernels.shape, 3 if layout.recompute == "full" else 2
    size = _activation(kernels, shape.hidden)
    each = 2 * group.all_gather(size) if layout.sequence_parallel else group.all_reduce(size)
    waited = kernels.efficiency.exposed_tensor if kernels.assumed.hides_tensor else 1.0
    moe, sums, gathered = shape.moe_layers / shape.layers, float(shape.sums), 0.0
    if moe and not shape.shared_experts:
        sums -= moe
    if moe and not kernels.assumed.spreads_experts(shape, layout):
        gathered = moe * 2 * group.all_gather(_routed(kernels) * shape.experts_per_token)
    return passes * (waited * sums * each + gathered)


def _context(kernels: Kernels) -> float:
    """Keys and values pass around the ring, once forward and twice backward; half is hidden. Ranks
    exchange their tokens for heads before and after a scan, which is not hidden."""
    shape, layout = kernels.shape, kernels.layout
    if layout.context == 1 or not (shape.heads or shape.parts):
        return 0.0
    group = Group(kernels.cluster, kernels.efficiency, layout.context, layout.tensor)
    size = BYTES[kernels.assumed.precision] * kernels.tokens / layout.tensor
    times = 3 if layout.recompute == "full" else 2
    exchanges = sum(
        times * group.exchange(size * part.exchanged, 1) for part in shape.parts if part.exchanged
    )
    if not shape.heads:
        return exchanges
    values = shape.value_head_size or shape.head_size
    width = max(shape.kv_heads / layout.tensor, 1) * (shape.head_size + values)
    size = BYTES[kernels.assumed.precision] * kernels.tokens * layout.context * width
    passes = 3 + (layout.recompute == "full")
    return exchanges + 0.5 * passes * group.all_gather(size)


def _expert(kernels: Kernels) -> float:
    """Tokens go to their experts and back, forward and backward: four exchanges."""
    shape, layout, assumed = kernels.shape, kernels.layout, kernels.assumed
    ranks, stride = layout.expert, layout.tensor
    size, copies = _routed(kernels) * assumed.busiest(shape, layout), shape.experts_per_token
    spread = assumed.spreads_experts(shape, layout)
    if spread:
        ranks, stride = ranks * stride, 1
    if spread or layout.sequence_parallel:
        size /= layout.tensor
    apart = assumed.sends_copies
    if apart is None:
        apart = not backend_of(layout).sends_tokens_once
    if apart:
        size, copies = size * copies, 1
    group = Group(kernels.cluster, kernels.efficiency, ranks, stride)
    again = layout.recompute == "selective" and assumed.habits.repeats_exchange
    passes = 6 if again or layout.recompute == "full" else 4
    return passes * group.exchange(size, copies)


def _sends(kernels: Kernels, stage: float) -> tuple[float, float]:
    """Activations go to the next stage and gradients back: exposed while the pipeline fills and
    drains, at most half exposed in between. If an interleaved pipeline computes at the same time,
    only what takes longer than the computation of a piece is exposed, or what it slows down. No
    step is faster than the network: a host between two others sends twice for each piece.
    ``stage`` is the time of a micro-batch in the slowest stage.

    Return the exposed seconds, and those of the computation, which cannot hide other traffic, too.
    """
    layout = kernels.layout
    p, v = layout.pipeline, layout.virtual_pipeline
    if p == 1:
        return 0.0, 0.0
    stride = layout.tensor * layout.context * layout.data
    group = Group(kernels.cluster, kernels.efficiency, p, stride)
    # Each tensor rank sends its part of the sequence.
    shared = layout.sequence_parallel or backend_of(layout).sends_shares
    size = _activation(kernels, residual(kernels.shape))
    once = group.send(size / (layout.tensor if shared else 1))
    waited, hidden = 0.5 * once, 0.0
    if v > 1 and backend_of(layout).overlaps_sends:
        piece = stage / v / 3  # The forward pass takes a third.
        waited = min(waited, exposed(once, piece, OVERLAPPED))
        hidden = min(once - waited, piece)
    if p > 2 and stride >= kernels.cluster.gpus_per_host:
        waited = max(waited, once - stage / v / 2)
    pieces = layout.grad_accumulation * v
    return 2 * ((p - 1) * once + pieces * waited), 2 * pieces * hidden
