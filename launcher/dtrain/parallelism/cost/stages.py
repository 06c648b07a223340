"""The layers of each pipeline stage, their parameters, and its micro-batches in flight."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from functools import lru_cache

from dtrain.parallelism.assumptions import Assumptions
from dtrain.parallelism.backends import backend_of
from dtrain.parallelism.model.flop import attention_flop
from dtrain.parallelism.model.further import further_layers, most_stages
from dtrain.parallelism.model.shape import Shape
from dtrain.records import cached_property, dataclass
from dtrain.runtime.layout import Layout, layers_of_stages


@dataclass(frozen=True)
class StageRank:
    """One rank of a pipeline stage; without a pipeline, of the only stage."""

    shape: Shape
    layout: Layout
    assumed: Assumptions
    stage: int
    layers: int

    @property
    def first(self) -> bool:
        return self.stage == 0

    @property
    def last(self) -> bool:
        return self.stage == self.layout.pipeline - 1

    @cached_property
    def kinds(self) -> Collection[Shape]:
        """The kinds of its layers."""
        if not self.shape.pattern:
            return (self.shape,)
        return kinds_of_stages(self.shape, self.layout)[self.stage]

    @cached_property
    def head(self) -> float:
        """Parameters of the output layer."""
        return self.shape.head_parameters / self.layout.tensor if self.last else 0.0

    @cached_property
    def embedding(self) -> float:
        """Parameters of the embedding."""
        held = has_embedding(self.shape, self.layout, self.stage)
        return self.shape.embedding_parameters / self.layout.tensor if held else 0.0


def stage_layers(shape: Shape, layout: Layout, fullest: str = "") -> tuple[int, ...]:
    """Return the number of layers of each pipeline stage, at least one each, first stage first.

    ``fullest``: as in `MemoryHabits`.
    """
    stages = layout.pipeline
    if fullest == "inner" and stages > 1 and shape.layers + 3 >= 2 * stages:
        # The embedding, the last norm and the output layer count as layers.
        each, left = divmod(shape.layers + 3, stages)
        counts = [each + (stage < left) for stage in range(stages)]
        counts[0] -= 1
        counts[-1] -= 2
        return tuple(counts)
    if backend_of(layout).runtime_memory:
        # `dtrain.runtime` gives a stage at most one more layer than another.
        return _alike(shape.layers, stages)
    if shape.pattern:
        # Cut where the stages' FLOPs are most alike.
        return _counts(shape, stages, layout.virtual_pipeline)
    # Stages are equal if their number divides the layers, as in frameworks. Otherwise the last one,
    # which also has the output layer, gets fewer, and so does the first, which has the embedding:
    # the slowest stage determines the speed.
    ends = shape.embedding_parameters + (0 if shape.tied else shape.head_parameters)
    layer = (shape.active_parameters - ends) / shape.layers
    return _spread(shape.layers, stages, shape.head_parameters / layer)


def layers_of_stage(shape: Shape, layout: Layout, assumed: Assumptions, stage: int) -> int:
    """Return the number of layers of one stage, as the software spreads them: see
    `MemoryHabits.fullest`."""
    p, fullest = layout.pipeline, assumed.habits.fullest
    if p > 1 and fullest == "first" and stage == 0:
        head = shape.head_parameters / shape.layer_parameters()
        return min(int((shape.layers + head) / p) + 1, shape.layers - p + 1)
    if fullest == "last" and stage == p - 1:
        return -(-shape.layers // p)
    return stage_layers(shape, layout, fullest)[stage]


def extreme_stages(shape: Shape, layout: Layout, assumed: Assumptions) -> list[int]:
    """Return the stages of which one needs the most memory.

    Inner stages differ in their layers and in their micro-batches in flight, of which the first one
    with such layers has the most. It has less than the first stage of all if that has as many
    layers: fewer micro-batches, and no embedding. Only PyTorch's buffers may outweigh this: an
    inner stage receives more.
    """
    if layout.pipeline == 1:
        return [0]
    last = layout.pipeline - 1
    stages = {0, last}
    if shape.pattern:
        alike = backend_of(layout).runtime_memory
        stages |= _different(shape, layout.pipeline, layout.virtual_pipeline, alike)
    elif _first_are_dense(shape):
        piece = stage_layers(shape, layout)[1] / layout.virtual_pipeline
        stages |= {1, min(last, math.ceil(shape.dense_layers / piece))}
    else:
        first, second = (layers_of_stage(shape, layout, assumed, stage) for stage in (0, 1))
        if second > first or backend_of(layout).torch_kernels:
            stages.add(1)
    return sorted(stages)


@lru_cache(maxsize=4096)
def _different(shape: Shape, stages: int, pieces: int, alike: bool) -> frozenset[int]:
    """Return the first inner stage of each kind of stages of a pattern."""
    kinds = _kinds_of_stages(shape, stages, pieces, alike)
    first: dict[object, int] = {}
    for stage in range(1, stages - 1):
        first.setdefault(frozenset(kinds[stage].items()), stage)
    return frozenset(first.values())


def fullest_stage(shape: Shape, layout: Layout) -> int:
    """Return the stage that probably needs the most memory: one of `extreme_stages`."""
    if shape.pattern:
        alike = backend_of(layout).runtime_memory
        return _heaviest(shape, layout.pipeline, layout.virtual_pipeline, alike)
    return 1 if layout.pipeline > 2 and _first_are_dense(shape) else 0


@lru_cache(maxsize=4096)
def _heaviest(shape: Shape, stages: int, pieces: int, alike: bool) -> int:
    """Return the first stage of a pattern with the most parameters."""
    sums = [sum(both) for both in _parameters(shape, stages, pieces, alike)]
    return sums.index(max(sums))


def receive_buffers(layout: Layout, stage: int) -> int:
    """Return the number of tensors into which a stage of PyTorch's pipelines receives: one for the
    input and one for the output's gradient of each piece and micro-batch of a step, from its start
    to its end (``_prepare_forward_infra`` in ``torch/distributed/pipelining/stage.py``)."""
    if layout.pipeline == 1:
        return 0
    ends = (stage == 0) + (stage == layout.pipeline - 1)
    return (2 * layout.virtual_pipeline - ends) * layout.grad_accumulation


def kinds_of_stages(shape: Shape, layout: Layout) -> tuple[dict[Shape, int], ...]:
    """Return the number of layers of each kind, for each stage of a model with a pattern."""
    alike = backend_of(layout).runtime_memory
    return _kinds_of_stages(shape, layout.pipeline, layout.virtual_pipeline, alike)


@lru_cache(maxsize=4096)
def _kinds_of_stages(
    shape: Shape, stages: int, pieces: int, alike: bool
) -> tuple[dict[Shape, int], ...]:
    """Stage i has every piece whose number leaves the remainder i, as in Megatron-LM. ``alike``:
    pieces have equal numbers of layers, or one more."""
    found: tuple[Counter[Shape], ...] = tuple(Counter() for _ in range(stages))
    start, pieces = 0, min(stages * pieces, most_stages(shape))
    counts = _alike(shape.layers, pieces) if alike else _cut(shape, pieces)
    for piece, count in enumerate(counts):
        found[piece % stages].update(shape.pattern[start : start + count])
        start += count
    return found


@lru_cache(maxsize=4096)
def _counts(shape: Shape, stages: int, pieces: int) -> tuple[int, ...]:
    return tuple(sum(kinds.values()) for kinds in _kinds_of_stages(shape, stages, pieces, False))


def _cut(shape: Shape, pieces: int) -> tuple[int, ...]:
    """Return the layers of each piece of a pipeline: those whose largest has the least FLOPs; equal
    numbers of layers if that is within 5 %. Earlier pieces, which hold more micro-batches, get
    fewer layers. The last one has all layers that predict further tokens."""
    weights = [
        (kind.layer_flop + attention_flop(kind, causal=True)) * kind.seq_len
        for kind in shape.pattern
    ]
    together = shape.layers - most_stages(shape)
    weights[-together - 1 :] = [sum(weights[-together - 1 :])]
    head = 2.0 * shape.head_parameters * (shape.target_len or shape.seq_len)
    least, most = max(sum(weights) / pieces, *weights), sum(weights)
    for _ in range(30):
        limit = (least + most) / 2
        fits = _filled(weights, head, pieces, limit) is not None
        least, most = (least, limit) if fits else (limit, most)
    each = len(weights) // pieces
    if len(weights) % pieces == 0:
        starts = range(0, len(weights), each)
        largest = max(sum(weights[start : start + each]) for start in starts)
        if largest <= 1.05 * most:
            return (*(each,) * (pieces - 1), each + together)
    counts = _filled(weights, head, pieces, most)
    counts = counts or (*(each,) * (pieces - 1), len(weights) - each * (pieces - 1))
    return (*counts[:-1], counts[-1] + together)


def _filled(weights: list[float], head: float, pieces: int, limit: float) -> tuple[int, ...] | None:
    """Return the layers of ``pieces`` pieces of at most ``limit``, filled from the last one, which
    also has ``head`` if there is room; None if they do not suffice."""
    counts: list[int] = []
    count, total = 0, min(head, limit - weights[-1])
    for left, weight in zip(range(len(weights), 0, -1), reversed(weights), strict=True):
        if count and (total + weight > limit or left < pieces - len(counts)):
            counts.append(count)
            count, total = 0, 0.0
        count, total = count + 1, total + weight
    counts.append(count)
    return tuple(reversed(counts)) if len(counts) == pieces else None


_alike = lru_cache(maxsize=4096)(layers_of_stages)


@lru_cache(maxsize=4096)
def _spread(layers: int, stages: int, head: float) -> tuple[int, ...]:
    """``head`` is the output layer's work, in units of a layer's work."""
    if layers % stages == 0:
        return (layers // stages,) * stages
    counts = [1] * stages
    weights = [0.0] * stages
    weights[-1] = head
    # The embedding takes memory but little time: it decides between otherwise equal stages.
    weights[0] += 0.1
    for _ in range(layers - stages):
        lightest = min(range(stages), key=lambda stage: counts[stage] + weights[stage])
        counts[lightest] += 1
    return tuple(counts)


def has_embedding(shape: Shape, layout: Layout, stage: int) -> bool:
    """Return whether a stage has the embedding. The last one may have a copy, which a tied output
    layer is already."""
    copied = stage == layout.pipeline - 1 and not shape.tied
    return stage == 0 or (copied and further_layers(shape) > 0)


def parameters_of_stage(
    shape: Shape, layout: Layout, layers: int, stage: int
) -> tuple[float, float]:
    """Parameters on one GPU of a stage of ``layers``: all but the experts', and the experts'."""
    if shape.pattern:
        alike = backend_of(layout).runtime_memory
        dense, routed = _parameters(shape, layout.pipeline, layout.virtual_pipeline, alike)[stage]
    else:
        moe = _moe_layers(shape, layout, layers, stage)
        every = shape.experts * shape.expert_parameters
        dense = moe * (shape.layer_parameters(moe=True) - every)
        dense += (layers - moe) * shape.layer_parameters(moe=False)
        routed = moe * every
    if has_embedding(shape, layout, stage):
        dense += shape.embedding_parameters
    if stage == layout.pipeline - 1 and not (shape.tied and stage == 0):
        dense += shape.head_parameters
    return dense / layout.tensor, routed / layout.expert / layout.tensor


@lru_cache(maxsize=4096)
def _parameters(
    shape: Shape, stages: int, pieces: int, alike: bool
) -> tuple[tuple[float, float], ...]:
    """For each stage of a pattern, parameters of the layers without and in experts."""
    found = []
    for kinds in _kinds_of_stages(shape, stages, pieces, alike):
        every = sum(count * kind.layer_parameters() for kind, count in kinds.items())
        routed = sum(count * kind.experts * kind.expert_parameters for kind, count in kinds.items())
        found.append((float(every - routed), float(routed)))
    return tuple(found)


def _moe_layers(shape: Shape, layout: Layout, layers: int, stage: int) -> float:
    """Number of a stage's layers with experts."""
    if not _first_are_dense(shape):
        return layers * shape.moe_layers / shape.layers
    piece = layers / layout.virtual_pipeline
    return layers - min(piece, max(0.0, shape.dense_layers - stage * piece))


def _first_are_dense(shape: Shape) -> bool:
    """Whether layers without experts are the first of the model. If they are many, they alternate
    with the others, as in Llama 4 Maverick."""
    return shape.experts > 0 and 0 < 2 * shape.dense_layers < shape.layers


def adapters_of_stage(shape: Shape, layout: Layout, layers: int) -> tuple[float, float]:
    """Parameters of the adapters on one GPU of a stage of ``layers``: all but the experts', and the
    experts'."""
    moe = layers * shape.moe_layers / shape.layers
    dense = (layers - moe) * shape.adapter_parameters(moe=False)
    routed = 0.0
    if moe:
        every = shape.experts * shape.expert_adapter_parameters
        dense += moe * (shape.adapter_parameters(moe=True) - every)
        routed = moe * every
    return dense / layout.tensor, routed / layout.expert / layout.tensor


def in_flight(layout: Layout, stage: int, *, hides_exchange: bool = False) -> float:
    """Return the number of micro-batches whose activations a stage holds at once.

    1F1B: p − stage; interleaving adds a part of a micro-batch for each further chunk:
    p·(1 + (p−1)/(p·v)) on the first stage (RAR, arXiv 2205.05198, section 4.2.3), and one chunk
    more if the exchange of tokens overlaps with another micro-batch (`Assumptions.hides_exchange`).
    ZB-2P holds twice as many; ZB-V as many as the first stage of 1F1B, on every stage.
    """
    p, v, m = layout.pipeline, layout.virtual_pipeline, layout.grad_accumulation
    if layout.schedule == "gpipe":
        return float(m)
    if layout.schedule == "zb-v":
        held = float(p)
    else:
        held = (p - stage) * (2.0 if layout.schedule == "zb-2p" else 1.0)
        if v > 1:
            # Warm-up is 2·(p − 1 − stage) + (v − 1)·p chunks, and one more with
            # ``overlap_moe_expert_parallel_comm`` (Megatron-LM, schedules.py).
            held = p + (p - 1 - 2 * stage + hides_exchange) / v
    return min(held, float(m))
