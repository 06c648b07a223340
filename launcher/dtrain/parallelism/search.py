"""Search: evaluate and rank every sensible split of a model over a cluster."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from dtrain.parallelism.assumptions import Assumptions
from dtrain.parallelism.backends import backend_of, refusals
from dtrain.parallelism.cluster.efficiency import Efficiency
from dtrain.parallelism.cluster.hardware import GpuCluster, Precision
from dtrain.parallelism.constraints import sound
from dtrain.parallelism.cost.candidate import Candidate
from dtrain.parallelism.model.shape import Shape
from dtrain.runtime.layout import Layout

LARGEST_MICRO_BATCH = 16
LARGEST_CONTEXT = 32
LEAST_TOKENS = 4096
"""Minimum tokens of a sequence on each context rank; fewer leave attention kernels idle."""
MOST_PIECES = 8
"""Maximum pieces of one stage in an interleaved schedule."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """A kind of layouts that do not fit, with the nearest one as example."""

    reason: str
    count: int
    example: Candidate


@dataclass(frozen=True, slots=True)
class Plan:
    """The result of a search."""

    layouts: tuple[Candidate, ...]
    """Layouts that fit, fastest first (simpler first if equally fast)."""
    rejected: tuple[Rejected, ...]
    """Layouts that do not fit, nearest first."""

    @property
    def considered(self) -> int:
        return len(self.layouts) + sum(rejected.count for rejected in self.rejected)


def search(
    shape: Shape,
    cluster: GpuCluster,
    efficiency: Efficiency,
    *,
    global_batch: int,
    precision: Precision = "bf16",
    fixed: Mapping[str, Any] | None = None,
    start: Layout | None = None,
) -> Plan:
    """Return all layouts for ``global_batch`` sequences a step that ``fixed`` allows.

    ``fixed`` maps fields of `Layout` to required values. ``start`` has the backend, and the fields
    that no search chooses. The optimizer is offloaded only
    if no layout fits without offload, or if ``fixed`` has it.

    Raises:
        UsageError: the GPU does not support ``precision``.
    """
    cluster.gpu.peak(precision)
    assumed = Assumptions.usual(precision)
    choices = _Choices(shape, cluster, global_batch, fixed or {}, assumed)
    fitting: list[Candidate] = []
    rest: list[Candidate] = []
    for offload in choices.of("offload", (False, True)):
        every = [
            Candidate(shape, layout, cluster, efficiency, assumed)
            for layout in choices.layouts(replace(start or Layout(), offload=offload))
        ]
        fitting = [candidate for candidate in every if candidate.fits]
        rest += [candidate for candidate in every if not candidate.fits]
        if fitting:
            break
    fitting.sort(key=_worth)
    return Plan(tuple(fitting), tuple(_grouped(rest)))


@dataclass(frozen=True, slots=True)
class _Choices:
    """The choices for each field of a layout, given the earlier fields."""

    shape: Shape
    cluster: GpuCluster
    global_batch: int
    fixed: Mapping[str, Any]
    assumed: Assumptions

    def of(self, name: str, choices: Iterable[Any]) -> Iterable[Any]:
        return (self.fixed[name],) if name in self.fixed else choices

    def layouts(self, start: Layout) -> Iterator[Layout]:
        """Yield every layout that divides evenly."""
        for sizes in self._sizes(start):
            share = self.global_batch // sizes.data
            experts = [
                size
                for size in _divisors(self.shape.experts)
                if sizes.copies % size == 0 and self._in_place(start, sizes.tensor, size)
            ]
            for expert in self.of("expert", experts or (1,)):
                for sharding in self.of("sharding", self._shardings(sizes)):
                    shard = self._shard(sizes) if sharding == "hybrid" else None
                    split = replace(sizes, expert=expert, sharding=sharding, shard=shard)
                    for layout in self._schedules(split, share):
                        # Only separately fixed values can be inconsistent.
                        if (not self.fixed or sound(layout, self.shape)) and not any(
                            refusals(self.shape, layout, self.assumed.precision)
                        ):
                            yield layout

    def _sizes(self, start: Layout) -> Iterator[Layout]:
        """Yield tensor, pipeline, context and data sizes whose product is the number of GPUs."""
        shape, gpus = self.shape, self.cluster.gpus
        within_host = min(self.cluster.gpus_per_host, gpus)
        for tensor in self.of("tensor", _divisors(within_host)):
            if gpus % tensor or shape.heads % tensor or shape.ffn_hidden % tensor:
                continue
            for pipeline in self.of("pipeline", _divisors(gpus // tensor)):
                if gpus % (tensor * pipeline) or pipeline > shape.layers:
                    continue
                ranks = gpus // (tensor * pipeline)
                for context in self.of("context", _divisors(ranks, LARGEST_CONTEXT)):
                    if ranks % context or not self._splits_sequence(context):
                        continue
                    if "context" not in self.fixed and not self._in_place(start, tensor, context):
                        continue
                    if any(refusals(shape, replace(start, tensor=tensor, context=context), "bf16")):
                        continue
                    data = ranks // context
                    if self.global_batch % data or self.fixed.get("data", data) != data:
                        continue
                    yield replace(
                        start, tensor=tensor, pipeline=pipeline, context=context, data=data
                    )

    def _in_place(self, start: Layout, tensor: int, size: int) -> bool:
        """Whether the backend of ``start`` lets ``size`` ranks wait for each other in a layer."""
        within_host = tensor * size <= self.cluster.gpus_per_host
        return size == 1 or within_host or backend_of(start).groups_across_hosts

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
        for micro_batch in self.of("micro_batch", _divisors(share, LARGEST_MICRO_BATCH)):
            if share % micro_batch:
                continue
            sized = replace(split, micro_batch=micro_batch, grad_accumulation=share // micro_batch)
            for pieces in self.of("virtual_pipeline", self._pieces(sized)):
                for recompute in self.of("recompute", self._recomputes(sized)):
                    divides = self.shape.seq_len // split.context % split.tensor == 0
                    for sequence in self.of("sequence_parallel", (split.tensor > 1 and divides,)):
                        yield replace(
                            sized,
                            virtual_pipeline=pieces,
                            recompute=recompute,
                            sequence_parallel=sequence,
                        )

    def _pieces(self, sized: Layout) -> Iterable[int]:
        p = sized.pipeline
        if p == 1 or self.shape.layers % p or sized.grad_accumulation % p:
            # Interleaving needs equal pieces, and whole rounds of micro-batches.
            return (1,)
        return _divisors(self.shape.layers // p, MOST_PIECES)

    def _recomputes(self, sized: Layout) -> Iterable[str]:
        if sized.offload_activations:
            return ("none",)
        if self.assumed.by_torch(sized) or not self.assumed.flash_attention:
            return ("none", "selective", "full")
        # With flash attention, selective recompute has no score matrix to drop.
        return ("none", "full")


@lru_cache(maxsize=1024)
def _divisors(number: int, most: int | None = None) -> tuple[int, ...]:
    most = number if most is None else min(number, most)
    return tuple(size for size in range(1, most + 1) if number % size == 0)


def _worth(candidate: Candidate) -> float:
    """Seconds of a step, plus 0.3 % for each kind of parallelism: a smaller gain is not worth
    the added complexity."""
    layout = candidate.layout
    ways = [
        layout.tensor > 1, layout.pipeline > 1, layout.virtual_pipeline > 1, layout.context > 1,
        layout.expert > 1, layout.sharding not in ("none", "optimizer"), layout.recompute != "none",
    ]  # fmt: skip
    return candidate.time.total * (1 + 0.003 * sum(ways))


def _grouped(rest: Iterable[Candidate]) -> Iterator[Rejected]:
    """Group by kind of split; the smallest candidate of a kind is its example."""
    kinds: dict[str, list[Candidate]] = {}
    for candidate in rest:
        kinds.setdefault(_kind(candidate), []).append(candidate)
    nearest = [
        (min(group, key=lambda one: one.memory.total), kind, group) for kind, group in kinds.items()
    ]
    for example, kind, group in sorted(nearest, key=lambda one: one[0].memory.total):
        yield Rejected(f"{kind}: out of memory", len(group), example)


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
    return ", ".join([*([" x ".join(parts)] if parts else []), *([sharding] if sharding else [])])
