"""Search: evaluate and rank every sensible split of a model over a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush, merge
from itertools import product, tee
from math import inf
from typing import Any

from dtrain.parallelism.assumptions import Assumptions
from dtrain.parallelism.backends import backend_of, refusals
from dtrain.parallelism.cluster.efficiency import Efficiency
from dtrain.parallelism.cluster.hardware import GpuCluster
from dtrain.parallelism.constraints import divisors, sound
from dtrain.parallelism.cost.candidate import Candidate
from dtrain.parallelism.cost.fitting import Boxes
from dtrain.parallelism.model.further import further_layers, most_stages
from dtrain.parallelism.model.shape import Shape
from dtrain.records import cached_property, changed, dataclass
from dtrain.runtime.layout import BackendName, Layout
from dtrain.runtime.layout_rules import contradictions

LARGEST_MICRO_BATCH = (16, 16_384)
"""Maximum sequences of a micro-batch, or tokens if that allows more: images and sentences are short
sequences."""
LARGEST_CONTEXT = 32
LEAST_TOKENS = 4096
"""Minimum tokens of a sequence on each context rank; fewer leave attention kernels idle."""
MOST_PIECES = 8
"""Maximum pieces of one stage in an interleaved schedule."""
OFFLOAD = 0.5
"""Share of its own time that a step with an offloaded optimizer counts longer in the ranking: how
fast the host updates depends on its threads and memory, which the planner does not know."""
_INDEPENDENT = {"micro_batch", "recompute", "offload"}
"""Fields that never make a layout inconsistent, whatever their values."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """A kind of layouts that do not fit, with the nearest one as example."""

    reason: str
    count: int
    example: Candidate


@dataclass(frozen=True)
class Plan:
    """The result of a search. The memory of a layout is computed when it is asked for: to find the
    best one takes that of a few."""

    own: tuple[Candidate, ...]
    before: Plan | None = None
    """A plan whose layouts come before its own. What it has found is not searched again."""

    @cached_property
    def layouts(self) -> tuple[Candidate, ...]:
        """All layouts without offload of the optimizer, and those with it that `search` adds."""
        return (*self.before.layouts, *self.own) if self.before else self.own

    @cached_property
    def best(self) -> Candidate | None:
        return next(self.ranked(), None)

    @property
    def on_gpus(self) -> Plan:
        """The plan of the layouts without offload."""
        return self.before or Plan(tuple(one for one in self.own if not one.layout.offload))

    def ranked(self) -> Iterator[Candidate]:
        """Yield the layouts that fit, best first: see `rank_key`."""
        return tee(self._ranking, 2)[1]

    @cached_property
    def _ranking(self) -> Iterator[Candidate]:
        """Never read itself. What its copies have computed is computed once."""
        own = self.ranked_below(inf)
        every = merge(self.before.ranked(), own, key=rank_key) if self.before else own
        return tee(every, 1)[0]

    def ranked_below(self, most: float) -> Iterator[Candidate]:
        """Yield its own layouts that fit and whose `rank_key` is below ``most``, best first.

        The queue orders them by lower limits. What is missing of the costs, the time and then the
        memory, is computed only when a limit reaches the front, which few do before the first
        results.
        """
        leanest = self._boxes.leanest
        queue = [
            (_effort(one.layout) * one.even_time, place, "data")
            for place, one in enumerate(self.own)
            if leanest[place].least_kept <= one.limit
        ]
        heapify(queue)
        while queue:
            least, place, missing = heappop(queue)
            if least >= most:
                return
            one = self.own[place]
            if missing == "data":
                if leanest[place].may_fit and one.least_kept <= one.limit:
                    heappush(queue, (_effort(one.layout) * one.time_with_data, place, "time"))
            elif missing == "time":
                heappush(queue, (_effort(one.layout) * one.time.total, place, "memory"))
            elif missing == "memory":
                if one.fits:
                    heappush(queue, (rank_key(one), place, ""))
            else:
                yield one

    @property
    def lean(self) -> Iterator[Candidate]:
        """Yield its own layouts whose activations may fit, whatever the states need."""
        for one, least in zip(self.own, self._boxes.leanest, strict=True):
            if least.least_activations <= one.limit:
                yield one

    @property
    def fitting(self) -> tuple[Candidate, ...]:
        """Layouts that fit."""
        return tuple(one for one, smaller in self._judged if smaller is None)

    @cached_property
    def rejected(self) -> tuple[Rejected, ...]:
        """Layouts that do not fit, nearest first."""
        kinds: dict[str, list[tuple[Candidate, Candidate]]] = {}
        for one, smaller in self._judged:
            if smaller is not None:
                kinds.setdefault(_kind(one), []).append((one, smaller))
        found = (
            Rejected(f"{kind}: out of memory", len(every), _smallest(every))
            for kind, every in kinds.items()
        )
        return tuple(sorted(found, key=lambda one: one.example.memory.total))

    @cached_property
    def _judged(self) -> list[tuple[Candidate, Candidate | None]]:
        """Each layout, with one that needs no more memory and does not fit; None if it fits."""
        own = zip(self.own, self._boxes.larger_than, strict=True)
        return [*(self.before._judged if self.before else ()), *own]

    @cached_property
    def _boxes(self) -> Boxes:
        return Boxes(self.own)

    @property
    def considered(self) -> int:
        return len(self.layouts)

    @property
    def backend(self) -> BackendName:
        return self.layouts[0].layout.backend


def candidates(
    shape: Shape,
    cluster: GpuCluster,
    efficiency: Efficiency,
    assumed: Assumptions,
    *,
    global_batch: int,
    fixed: Mapping[str, Any] | None = None,
    start: Layout | None = None,
) -> Iterator[Candidate]:
    """Yield all layouts for ``global_batch`` sequences a step that ``fixed`` allows. The optimizer
    is offloaded only if that is fixed.

    ``fixed`` maps fields of `Layout` to required values. ``start`` has the backend, and the fields
    that no search chooses; ``assumed`` is for this backend.

    Raises:
        UsageError: the GPU does not support the precision.
    """
    cluster.gpu.peak(assumed.precision)
    fixed = fixed or {}
    start = replace(start or Layout(), offload=fixed.get("offload", False))
    for layout in _Choices(shape, cluster, global_batch, fixed, start, assumed).layouts():
        yield Candidate(shape, layout, cluster, efficiency, assumed)


def search(layouts: Iterable[Candidate], *, offload: bool = True) -> Plan:
    """Return a plan of ``layouts``. With ``offload``, it also has layouts that offload the
    optimizer to a host that can hold it, if the best of these ranks before all others, or if no
    other fits."""
    plan = Plan(tuple(layouts))
    if not offload:
        return plan
    best, near = plan.best, plan.layouts
    if best:
        # Offload changes neither the activations nor the layers' time, a lower limit of a step's.
        most = rank_key(best) / (1 + OFFLOAD)
        lean = [one for one in plan.lean if one.even_time < most]
        if not any(_on_hosts(lean, plan).ranked_below(rank_key(best))):
            return plan
        near = tuple(one for one in near if one.even_time < most and one.least_time < most)
    return _on_hosts(near, plan)


def _on_hosts(near: Iterable[Candidate], plan: Plan) -> Plan:
    """Return a plan with the layouts of ``near`` that fit a host with offload, after ``plan``."""
    away = (one.offloaded for one in near if one.may_offload)
    return Plan(tuple(one for one in away if one.fits_host), plan)


@dataclass(frozen=True, slots=True)
class _Choices:
    """The choices for each field of a layout, given the earlier fields."""

    shape: Shape
    cluster: GpuCluster
    global_batch: int
    fixed: Mapping[str, Any]
    start: Layout
    assumed: Assumptions

    def of(self, name: str, choices: Iterable[Any]) -> Iterable[Any]:
        return (self.fixed[name],) if name in self.fixed else choices

    def layouts(self) -> Iterator[Layout]:
        """Yield every layout that divides evenly."""
        for sizes in self._sizes():
            share = self.global_batch // sizes.data
            experts = [
                size
                for size in divisors(self.shape.experts)
                if sizes.copies % size == 0 and self._in_place(sizes.tensor, size)
            ]
            for expert in self.of("expert", experts or (1,)):
                for sharding in self.of("sharding", self._shardings(sizes)):
                    shard = self._shard(sizes) if sharding == "hybrid" else None
                    split = changed(sizes, expert=expert, sharding=sharding, shard=shard)
                    if not any(contradictions(split)):
                        yield from filter(self._allows, self._schedules(split, share))

    def _allows(self, layout: Layout) -> bool:
        """Whether the layout is consistent, and its backend can train it."""
        # Only separately fixed values can be inconsistent.
        consistent = self.fixed.keys() <= _INDEPENDENT or sound(layout, self.shape)
        return consistent and not any(
            refusals(
                self.shape,
                layout,
                self.assumed.precision,
                narrow_states=self.assumed.narrow_states,
                hides_exchange=self.assumed.hides_exchange,
                one_graph=self.assumed.one_graph,
                on_cpus=self.cluster.gpu.is_cpu,
            )
        )

    def _sizes(self) -> Iterator[Layout]:
        """Yield tensor, pipeline, context and data sizes whose product is the number of GPUs."""
        shape, gpus, start = self.shape, self.cluster.gpus, self.start
        within_host = min(self.cluster.gpus_per_host, gpus)
        for tensor in self.of("tensor", divisors(within_host)):
            if gpus % tensor or any(unit % tensor for unit in shape.tensor_units):
                continue
            for pipeline in self.of("pipeline", divisors(gpus // tensor)):
                if gpus % (tensor * pipeline) or pipeline > most_stages(shape):
                    continue
                ranks = gpus // (tensor * pipeline)
                for context in self.of("context", _divisors(ranks, LARGEST_CONTEXT)):
                    if ranks % context or not self._splits_sequence(context):
                        continue
                    if "context" not in self.fixed and not self._in_place(tensor, context):
                        continue
                    split = replace(start, tensor=tensor, context=context, offload=False)
                    if any(refusals(shape, split, "bf16", on_cpus=self.cluster.gpu.is_cpu)):
                        continue
                    data = ranks // context
                    if self.global_batch % data or self.fixed.get("data", data) != data:
                        continue
                    yield replace(
                        start, tensor=tensor, pipeline=pipeline, context=context, data=data
                    )

    def _in_place(self, tensor: int, size: int) -> bool:
        """Whether the backend lets ``size`` ranks wait for each other in a layer."""
        within_host = tensor * size <= self.cluster.gpus_per_host
        return size == 1 or within_host or backend_of(self.start).groups_across_hosts

    def _splits_sequence(self, context: int) -> bool:
        """Causal context parallelism gives each rank two chunks of the sequence."""
        if context == 1:
            return True
        tokens = self.shape.seq_len / context
        return tokens % 2 == 0 and ("context" in self.fixed or tokens >= LEAST_TOKENS)

    def _shardings(self, sizes: Layout) -> Iterator[str]:
        yield "none"
        if sizes.copies == 1:
            return
        yield "optimizer"
        if sizes.pipeline == 1:
            # Sharded gradients must be reduced after every micro-batch, which a
            # pipeline cannot overlap.
            yield "gradients"
        yield "full"
        if self._shard(sizes) and sizes.pipeline == 1:
            yield "hybrid"

    def _shard(self, sizes: Layout) -> int | None:
        """Data ranks of one host; None if that is all of them, or only one."""
        ranks = sizes.copies
        local = min(ranks, self.cluster.gpus_per_host // sizes.tensor)
        return local if 1 < local < ranks and ranks % local == 0 else None

    def _schedules(self, split: Layout, share: int) -> Iterator[Layout]:
        """Yield the ways to split ``share`` sequences of each data rank into micro-batches."""
        sequences, tokens = LARGEST_MICRO_BATCH
        most = max(sequences, tokens // self.shape.seq_len)
        divides = self.shape.seq_len // split.context % split.tensor == 0
        recomputes = tuple(self.of("recompute", self._recomputes(split)))
        for micro_batch in self.of("micro_batch", _divisors(share, most)):
            if share % micro_batch:
                continue
            steps = share // micro_batch
            for pieces, recompute, sequence in product(
                self.of("virtual_pipeline", self._pieces(split, steps)),
                recomputes,
                self.of("sequence_parallel", (split.tensor > 1 and divides,)),
            ):
                yield changed(
                    split,
                    micro_batch=micro_batch,
                    grad_accumulation=steps,
                    virtual_pipeline=pieces,
                    recompute=recompute,
                    sequence_parallel=sequence,
                )

    def _pieces(self, split: Layout, steps: int) -> Iterable[int]:
        p, layers = split.pipeline, self.shape.layers
        if p == 1 or steps % p:
            # Interleaving needs whole rounds of micro-batches.
            return (1,)
        alike = [layers]
        if backend_of(split).uneven_pieces:
            # The embedding and the output layer each take the place of a layer; and the last piece
            # may have the layers that predict further tokens beside as many others.
            alike += [layers + 2, layers - further_layers(self.shape)]
        return next((_pieces_of(each // p) for each in alike if each % p == 0), (1,))

    def _recomputes(self, split: Layout) -> Iterable[str]:
        if split.offload_activations:
            return ("none",)
        drops = self.assumed.recomputes_modules(self.shape, changed(split, recompute="selective"))
        if drops or self.assumed.by_torch(split) or not self.assumed.flash_attention:
            return ("none", "selective", "full")
        # Of a dense model, selective recompute drops only scores, which flash attention has not.
        return ("none", "full")


def _divisors(number: int, most: int) -> tuple[int, ...]:
    return tuple(size for size in divisors(number) if size <= most)


def _pieces_of(layers: int) -> Iterator[int]:
    """Yield numbers of equal pieces of a stage with these ``layers``, each at least twice the one
    before: less changes a step by little."""
    least = 1
    for pieces in _divisors(layers, MOST_PIECES):
        if pieces >= least:
            yield pieces
            least = 2 * pieces


def rank_key(candidate: Candidate) -> float:
    """Return what layouts are ranked by, the least first: seconds of a step, with additions.

    With them, the first choice in 226 published sweeps takes 2.3 % longer than the fastest layout
    on average, and 2.5 % without (``scripts/validate_planner.py`` with all runs).
    """
    # Room for the estimate's error is worth a slightly slower step.
    risk = 0.0 if candidate.has_room else 0.03
    return (_effort(candidate.layout) + risk) * candidate.time.total


def compared_time(candidate: Candidate) -> float:
    """Return the seconds by which steps of different backends are compared, with the addition for
    offload."""
    return candidate.time.total * (1 + OFFLOAD * candidate.layout.offload)


def _effort(layout: Layout) -> float:
    """Factor of a step's time in the ranking, because a smaller gain is not worth the added
    complexity. Splitting layers or sequences counts as 4 %, within the error of the difference
    between two layouts (`CLOSE`)."""
    splits = [layout.tensor > 1, layout.pipeline > 1, layout.context > 1]
    features = [layout.virtual_pipeline > 1, layout.expert > 1, layout.sharding != "none"]
    factor = 1 + 0.04 * sum(splits) + 0.01 * sum(features) + 0.003 * (layout.recompute != "none")
    return factor + OFFLOAD * layout.offload


def _smallest(every: Sequence[tuple[Candidate, Candidate]]) -> Candidate:
    """Return the first layout that needs the least memory, from the memory of a few. Each one has
    another beside it that needs no more."""
    # Lower limits of the memory, most of them closer and slower than the one before.
    limits: tuple[Callable[[Candidate, Candidate], float], ...] = (
        lambda _, smaller: smaller.least_kept,
        lambda _, smaller: smaller.least_memory,
        lambda _, smaller: smaller.memory.total,
        lambda one, _: one.least_memory,
        lambda one, _: one.memory.total,
    )
    queue = [(limits[0](*both), place, 1) for place, both in enumerate(every)]
    heapify(queue)
    while True:
        _, place, known = heappop(queue)
        if known == len(limits):
            return every[place][0]
        heappush(queue, (limits[known](*every[place]), place, known + 1))


def _kind(candidate: Candidate) -> str:
    layout, cluster = candidate.layout, candidate.cluster
    parts = layout.split_by(("tensor", "pipeline", "context"))
    inside = layout.tensor * layout.pipeline * layout.context <= cluster.gpus_per_host
    if parts and inside and layout.sharding == "none" and cluster.hosts > 1:
        return "split inside each host, copied across hosts"
    sharding = {
        "none": "copied on every data rank" if layout.data > 1 else "",
        "optimizer": "optimizer sharded (ZeRO-1)",
        "gradients": "optimizer and gradients sharded (ZeRO-2)",
        "full": "everything sharded (ZeRO-3, FSDP)",
        "hybrid": "sharded in each host, copied across (HSDP)",
    }[layout.sharding]
    return ", ".join(filter(None, [" x ".join(parts), sharding])) or f"one {cluster.gpu.unit}"
