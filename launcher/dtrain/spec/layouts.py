"""The complete layout of a torch strategy, from the keys of ``job.layout`` in the file.

The strategy decides what is split and sharded, the hosts decide over how many workers. Keys that
follow from these two are optional; a key that contradicts them is a `MisfitError`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import gcd
from typing import Any

from dtrain.runtime.layout import SIZES, Layout
from dtrain.runtime.layout_rules import MisfitError
from dtrain.wording import either

Given = Mapping[str, Any]
"""The keys of ``job.layout`` in the file."""

_SPLITS = {"ddp": (), "fsdp": (), "hsdp": (), "tensor": ("tensor",), "pipeline": ("pipeline",)}
"""The dimensions that each strategy may split; ``3d`` and ``none`` may split all."""
_SHARDING = {"ddp": "none", "fsdp": "full", "hsdp": "hybrid"}
"""The sharding that each of these strategies implies."""
_OF_SHARDING = {sharding: strategy for strategy, sharding in _SHARDING.items()}


def strategy_of(layout: Layout) -> str:
    """The torch strategy that matches this layout; ``3d`` if it combines several."""
    split = layout.split_by(("tensor", "pipeline"))
    if layout.context > 1 or layout.expert > 1 or len(split) > 1:
        return "3d"
    if not split:
        return _OF_SHARDING.get(layout.sharding, "3d")
    return split[0] if layout.data == 1 else "3d"


def disagreements(strategy: str, given: Given) -> Iterator[MisfitError]:
    """A MisfitError for every key that contradicts the strategy."""
    fitting = strategy_of(Layout(**given))
    for size in ("tensor", "pipeline", "context", "expert"):
        if given.get(size, 1) > 1 and size not in _SPLITS.get(strategy, (size,)):
            yield MisfitError(
                size,
                f"the strategy {strategy} does not split a model by {size}, "
                f"but {size} is {given[size]}",
                f"use 'strategy: {fitting}', or remove {size}",
            )
    wanted = _SHARDING.get(strategy)
    sharding = given.get("sharding", wanted)
    if wanted and sharding != wanted:
        alternative = _OF_SHARDING.get(sharding, "3d")
        yield MisfitError(
            "sharding",
            f"the strategy {strategy} is 'sharding: {wanted}', but sharding is {sharding}",
            f"use 'strategy: {alternative}', or remove sharding",
        )


def sized(strategy: str, given: Given, workers: Sequence[int]) -> Layout:
    """The layout with all sizes, for hosts that run ``workers`` workers each.

    Raises MisfitError if the sizes cannot be derived, or if their product is not the number of
    workers.
    """
    world = sum(workers)
    follows: Mapping[str, object] = {}
    if world == 1 and strategy in _SHARDING:
        # One GPU, to try a script: no rank to shard with.
        follows = {"data": 1}
    elif strategy in ("ddp", "fsdp"):
        follows = {"data": world, "sharding": _SHARDING[strategy]}
    elif strategy == "hsdp":
        shard = given.get("shard") or _on_each_host(workers, "shards within a host", "shard")
        if shard == 1 and "shard" not in given:
            raise MisfitError(
                "strategy",
                "the strategy hsdp shards over the workers of a host, but each host has only one",
                "use 'strategy: fsdp' to shard over all hosts, or set job.layout.shard",
            )
        follows = {"data": world, "sharding": "hybrid", "shard": shard}
    elif strategy == "tensor":
        follows = _tensor(given, workers)
    elif strategy == "pipeline":
        stages = given.get("pipeline") or max(1, world // given.get("data", 1))
        follows = {"pipeline": stages, "data": world // stages}
    if given.get("schedule") == "zb-v":
        follows = {"virtual_pipeline": 2, **follows}
    layout = Layout(**{**follows, **given})
    if layout.world_size != world:
        raise _wrong_product(layout, given, workers)
    if strategy in ("tensor", "pipeline") and given.get(strategy) == 1 and world > 1:
        raise MisfitError(
            strategy,
            f"the strategy {strategy} splits a model by {strategy}, but {strategy} is 1",
            f"use 'strategy: {strategy_of(layout)}', or remove {strategy}",
        )
    return layout


def batched(layout: Layout, given: Given, global_batch: int | None) -> Layout:
    """The layout with its micro-batches; missing keys are derived from the global batch.

    Without a global batch, gradients are not accumulated, except in a pipeline: it needs
    micro-batches, and with two for each stage it is idle at most a third of the time.
    Raises MisfitError if the global batch is not divisible.
    """
    micro_batch, steps = given.get("micro_batch"), given.get("grad_accumulation")
    enough = 2 * layout.pipeline if layout.pipeline > 1 else 1
    if global_batch is None:
        return replace(layout, micro_batch=micro_batch or 1, grad_accumulation=steps or enough)
    share, rest = divmod(global_batch, layout.data)
    if micro_batch is None and steps is None:
        steps = enough if share % enough == 0 else share
    known = (micro_batch or 1) * (steps or 1)
    if rest or share % known or (micro_batch and steps and share != known):
        raise _wrong_batch(layout, given, global_batch)
    return replace(
        layout, micro_batch=micro_batch or share // known, grad_accumulation=steps or share // known
    )


def _tensor(given: Given, workers: Sequence[int]) -> Mapping[str, object]:
    world = sum(workers)
    tensor = given.get("tensor")
    if tensor is None and "data" in given:
        tensor = max(1, world // given["data"])
    if tensor is None:
        # With one worker on each host, layers can only be split across hosts.
        inside = _on_each_host(workers, "splits layers over the workers of a host", "tensor")
        tensor = inside if inside > 1 else world
    return {"tensor": tensor, "data": world // tensor, "sequence_parallel": tensor > 1}


def _on_each_host(workers: Sequence[int], what: str, key: str) -> int:
    """The number of workers of each host. Raises MisfitError if hosts differ."""
    counts = sorted(set(workers))
    if len(counts) > 1:
        raise MisfitError(
            "strategy",
            f"this strategy {what}, but hosts have {either(map(str, counts), 'and')} workers",
            f"list hosts with equal numbers of workers, or set job.layout.{key}",
        )
    return counts[0]


def _wrong_product(layout: Layout, given: Given, workers: Sequence[int]) -> MisfitError:
    world = sum(workers)
    sizes = [size for size in SIZES if size in given or getattr(layout, size) > 1]
    tensor = gcd(layout.tensor, *workers)
    pipeline = gcd(layout.pipeline, world // tensor)
    context = gcd(layout.context, world // (tensor * pipeline))
    data = world // (tensor * pipeline * context)
    fitting = Layout(tensor=tensor, pipeline=pipeline, context=context, data=data)
    return MisfitError(
        "layout",
        f"the layout is for {layout.world_size} workers "
        f"({layout.product(sizes) or 'one of each'}), but the hosts have {world}",
        "the product of tensor, pipeline, context and data must equal the number of workers, e.g. "
        f"{fitting.product(s for s in SIZES if s in sizes or s == 'data')}",
    )


def _wrong_batch(layout: Layout, given: Given, global_batch: int) -> MisfitError:
    factors = ("data", *(key for key in ("micro_batch", "grad_accumulation") if key in given))
    product = layout.product(factors)
    if len(factors) == 3:
        return MisfitError(
            "global_batch",
            f"the global batch is {global_batch}, but the layout makes it {layout.global_batch} "
            f"({product})",
            "change one of the four, or remove grad_accumulation",
        )
    free = [key for key in factors if key in given]
    step = layout.data * given.get("micro_batch", 1) * given.get("grad_accumulation", 1)
    near = sorted({max(step, global_batch // step * step), (global_batch // step + 1) * step})
    return MisfitError(
        "global_batch",
        f"the global batch is {global_batch}, which is not a multiple of {step} ({product})",
        f"set it to {either(map(str, near))}{f', or change {either(free)}' if free else ''}",
    )
