"""Check whether fixed sizes divide the model and the cluster, and suggest sizes that do."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, get_args

from dtrain.diagnostics import UsageError
from dtrain.parallelism.backends import BACKENDS, most_pieces
from dtrain.parallelism.cluster.hardware import GpuCluster
from dtrain.parallelism.model.further import most_stages
from dtrain.parallelism.model.shape import Shape
from dtrain.runtime.layout import SIZES, BackendName, Layout, Recompute, Sharding
from dtrain.runtime.layout_rules import contradictions, uneven_rounds
from dtrain.wording import counted, either, plural

LIMITS = {
    "layers": 2_000,
    "hidden": 10**7,
    "heads": 10**6,
    "kv_heads": 10**6,
    "ffn_hidden": 10**8,
    "head_size": 10**6,
    "vocab": 10**9,
    "seq_len": 10**9,
    "experts": 10**4,
}
"""Upper limits of a model's sizes, far above those of any trained model. The time of a search
grows with the number of ways to divide them."""
MAX_BATCH = 10**9
"""Sequences in a step."""


def sound(layout: Layout, shape: Shape) -> bool:
    """Whether separately fixed values are consistent."""
    return (
        not any(contradictions(layout))
        and not any(uneven_rounds(layout))
        and layout.pipeline * layout.virtual_pipeline <= most_pieces(shape, layout)
        and not (layout.sharding == "hybrid" and layout.shard is None)
    )


def check_sizes(shape: Shape, global_batch: int) -> None:
    """Raise UsageError if the model or the batch is too large to search for layouts."""
    for name, limit in LIMITS.items():
        if getattr(shape, name) > limit:
            raise UsageError(
                f"the model's {name} is {getattr(shape, name)}, which is too large to plan for",
                hint=f"at most {limit:,}",
            )
    if global_batch > MAX_BATCH:
        raise UsageError(
            f"a global batch of {global_batch:,} sequences is too large to plan for",
            hint=f"at most {MAX_BATCH:,}",
        )


def check(
    shape: Shape,
    cluster: GpuCluster,
    global_batch: int,
    fixed: Mapping[str, Any],
    backend: BackendName,
) -> None:
    """Raise UsageError if a fixed size does not divide; name its field and sizes that do."""
    _check_values(fixed)
    if fixed.get("offload") and not cluster.gpu.has_host:
        raise UsageError(
            f"`offload` moves nothing on {cluster.gpu.name}: its memory is the host's",
            hint="leave it out",
        )
    _check_product(cluster, fixed)
    known, derived = completed(cluster, fixed)

    def refuse(name: str, reason: str, would: Iterable[int]) -> UsageError:
        text = f"`{name}={known[name]}`"
        if name == derived:
            given = ", ".join(f"`{size}={known[size]}`" for size in SIZES if size != name)
            text = f"{given} on {cluster.devices} make {name} {known[name]}, which"
        return UsageError(f"{text} {reason}", hint=_use(name, would, derived))

    gpus = divisors(cluster.gpus)
    units = shape.tensor_units
    if "tensor" in known and any(unit % known["tensor"] for unit in units):
        others = [str(unit) for unit in units if unit not in (shape.heads, shape.ffn_hidden)]
        also = f", and the {' and '.join(others)} of other layers" if others else ""
        raise refuse(
            "tensor",
            f"does not divide the model's {shape.heads} heads and its MLP of {shape.ffn_hidden}"
            f"{also}",
            (t for t in gpus if not any(unit % t for unit in units)),
        )
    if "pipeline" in known and known["pipeline"] > most_stages(shape):
        raise refuse(
            "pipeline",
            f"is more stages than the {most_stages(shape)} into which the model can be cut",
            (p for p in gpus if p <= most_stages(shape)),
        )
    if "context" in known and known["context"] > 1 and shape.seq_len % (2 * known["context"]):
        raise refuse(
            "context",
            f"cannot give each {cluster.gpu.unit} two equal parts of a sequence of {shape.seq_len} "
            "tokens",
            (c for c in gpus if c == 1 or shape.seq_len % (2 * c) == 0),
        )
    if "data" in known and global_batch % known["data"]:
        error = refuse(
            "data",
            f"does not divide the batch of {counted(global_batch, 'sequence')}",
            (d for d in gpus if global_batch % d == 0),
        )
        near = max(1, round(global_batch / known["data"])) * known["data"]
        raise UsageError(error.message, hint=f"{error.hint}, or `global_batch={near}`")
    _check_expert(shape, cluster, known)
    _check_batch(global_batch, known)
    # An unknown size can use all GPUs that the known sizes leave.
    rest = cluster.gpus // math.prod(known.get(size, 1) for size in SIZES)
    layout = Layout(**{**dict.fromkeys(SIZES, rest), **known, "backend": backend})
    for misfit in contradictions(layout, "`{}`".format):
        raise UsageError(misfit.message, hint=misfit.hint)
    _check_pieces(shape, global_batch, layout, known)


def none_left(
    shape: Shape, cluster: GpuCluster, global_batch: int, fixed: Mapping[str, Any]
) -> UsageError:
    """Return the error for constraints that each can be met, but not together."""
    if fixed:
        given = ", ".join(f"`{name}={value!r}`" for name, value in fixed.items())
        together = f"no layout on {cluster.devices} divides evenly with {given}"
        hint = f"leave one of them out; the batch is {counted(global_batch, 'sequence')}"
        if len(fixed) == 1:
            together += f" and a batch of {counted(global_batch, 'sequence')}"
            hint = "leave it out, or give another `global_batch`"
        if fixed.get("sharding") == "hybrid":
            hint = "hybrid sharding needs data ranks both within a host and across hosts"
        return UsageError(together, hint=hint)
    return UsageError(
        f"a batch of {counted(global_batch, 'sequence')} and {counted(shape.layers, 'layer')} "
        f"cannot be spread over {cluster.devices}",
        hint=f"use fewer {plural(2, cluster.gpu.unit)}, or a `global_batch` that is a multiple of "
        f"{cluster.gpus}",
    )


def _check_values(fixed: Mapping[str, Any]) -> None:
    """Check each value on its own."""
    for name in (*SIZES, "expert", "micro_batch", "virtual_pipeline"):
        if fixed.get(name, 1) < 1:
            raise UsageError(f"`{name}={fixed[name]}` is not a size", hint="at least 1")
    for name, kinds, hint in (
        (
            "sharding",
            get_args(Sharding),
            "ZeRO-1 is optimizer, ZeRO-2 gradients, ZeRO-3 and FSDP full, HSDP hybrid",
        ),
        ("recompute", get_args(Recompute), "selective recomputes cheap operations, full all"),
    ):
        if fixed.get(name, "none") not in kinds:
            raise UsageError(
                f"`{name}` {fixed[name]!r} is not one of {', '.join(kinds)}", hint=hint
            )


def _check_product(cluster: GpuCluster, fixed: Mapping[str, Any]) -> None:
    """Check that each size, and the product of all sizes, divides the number of GPUs."""
    gpus = cluster.gpus
    for name in SIZES:
        if gpus % fixed.get(name, 1):
            raise UsageError(
                f"`{name}={fixed[name]}` does not divide {cluster.devices}",
                hint=_use(name, divisors(gpus), ""),
            )
    given = {name: fixed[name] for name in SIZES if name in fixed}
    product = math.prod(given.values())
    if not given or (gpus % product == 0 and (len(given) < len(SIZES) or product == gpus)):
        return
    last = next(reversed(given))
    others = product // given[last]
    if gpus % others:
        hint = f"make the product a divisor of {gpus}"
    elif len(given) == len(SIZES):
        hint = f"use `{last}={gpus // others}`"
    else:
        hint = _use(last, divisors(gpus // others), "")
    text = " x ".join(f"`{name}={size}`" for name, size in given.items())
    raise UsageError(f"{text} = {product} does not make up {cluster.devices}", hint=hint)


def completed(cluster: GpuCluster, fixed: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return ``fixed`` with the sizes that follow from the others, and the name of the size that is
    a quotient.

    Requires that the sizes divide the number of GPUs, which `check` tests.
    """
    missing = [name for name in SIZES if name not in fixed]
    product = math.prod(fixed.get(name, 1) for name in SIZES)
    if len(missing) == 1:
        return {**fixed, missing[0]: cluster.gpus // product}, missing[0]
    # If the fixed sizes use all GPUs, the other sizes are 1.
    ones = missing if product == cluster.gpus else ()
    return {**fixed, **dict.fromkeys(ones, 1)}, ""


def _check_expert(shape: Shape, cluster: GpuCluster, known: Mapping[str, Any]) -> None:
    expert = known.get("expert", 1)
    if expert == 1:
        return
    if not shape.experts:
        raise UsageError(f"`expert={expert}`: the model has no experts", hint="leave it out")
    ranks = cluster.gpus // math.prod(known.get(name, 1) for name in ("tensor", "pipeline"))
    if shape.experts % expert or ranks % expert:
        raise UsageError(
            f"`expert={expert}` does not divide the model's {shape.experts} experts"
            + (f" and the {ranks} ranks that they can be spread over" if ranks % expert else ""),
            hint=_use("expert", divisors(math.gcd(shape.experts, ranks)), ""),
        )


def _check_batch(global_batch: int, known: Mapping[str, Any]) -> None:
    share, micro = global_batch // known.get("data", 1), known.get("micro_batch", 1)
    if share % micro:
        sequences = counted(share, "sequence")
        whose = f"each data rank's {sequences}" if known.get("data", 1) > 1 else f"the {sequences}"
        raise UsageError(
            f"`micro_batch={micro}` does not divide {whose}",
            hint=_use("micro_batch", (size for size in divisors(share) if size <= 64), "")
            + ", or another `global_batch`",
        )


def _check_pieces(
    shape: Shape, global_batch: int, layout: Layout, known: Mapping[str, Any]
) -> None:
    pieces, stages = layout.virtual_pipeline, known.get("pipeline")
    if pieces == 1 or stages is None:
        return
    # A plan may be for another backend than the layout's.
    most = max(most_pieces(shape, replace(layout, backend=name)) for name in BACKENDS)
    if stages * pieces > most:
        raise UsageError(
            f"`virtual_pipeline={pieces}` with {stages} stages makes {stages * pieces} pieces, "
            f"more than the {most} into which the model can be cut",
            hint="leave it out"
            + (f", or use at most {most // stages}" if most >= 2 * stages else ""),
        )
    if {"data", "micro_batch"} <= set(known):
        unit = layout.data * layout.micro_batch
        steps = global_batch // unit
        for misfit in uneven_rounds(replace(layout, grad_accumulation=steps)):
            raise UsageError(
                f"`virtual_pipeline={pieces}`: {misfit.message}",
                hint="leave it out, or use a `global_batch` that is a multiple of "
                f"{unit * stages:,}, or a smaller `micro_batch`",
            )


def _use(name: str, would: Iterable[int], derived: str) -> str:
    sizes = [str(size) for size in would]
    shown = either(sizes if len(sizes) <= 12 else [*sizes[:11], sizes[-1]])
    if name == derived:
        return f"choose them so that {name} comes to {shown}"
    return f"use `{name}` {shown}"


@lru_cache(maxsize=1024)
def divisors(number: int) -> tuple[int, ...]:
    """The divisors of a number above 0, ascending."""
    low = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return tuple(sorted({*low, *(number // size for size in low)}))
