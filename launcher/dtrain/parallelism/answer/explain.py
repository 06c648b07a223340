"""Describe a layout in text: recommendation, speed and memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from dtrain.parallelism.answer.units import amount, gib, percent, seconds, tflops
from dtrain.parallelism.backends import backend_of, without_backend
from dtrain.parallelism.cost.candidate import HEADROOM, HOST_HEADROOM, Candidate
from dtrain.parallelism.model.shape import Shape
from dtrain.runtime.layout import Layout
from dtrain.wording import counted, either

MEMORY_PARTS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "activations": "activations",
    "logits": "logits",
    "gathered": "weight copies",
    "temporary": "temporary buffers",
    "communication": "communication buffers",
    "context": "device context",
    "fragmentation": "fragmentation",
}
"""Titles of the fields of `Memory` that are in its total."""
TIME_PARTS = {
    "compute": "computation",
    "recompute": "recomputation",
    "tensor": "tensor-parallel traffic",
    "context": "context-parallel traffic",
    "expert": "expert-parallel traffic",
    "pipeline": "pipeline sends",
    "bubble": "pipeline bubble",
    "data": "data-parallel traffic",
    "optimizer": "optimizer step",
    "host": "waiting for the CPU",
    "other": "data loading, logging",
}
"""Titles of the fields of `StepTime`."""
SHARDING = {
    "none": "none",
    "optimizer": "ZeRO-1",
    "gradients": "ZeRO-2",
    "full": "FSDP",
    "hybrid": "HSDP",
}
"""Short names: the ZeRO stages, and PyTorch's names for full sharding."""


def headline(candidate: Candidate) -> str:
    """Describe a layout in two or three sentences."""
    return " ".join([_split(candidate), _steps(candidate.layout), *_savings(candidate)])


def kinds(shape: Shape) -> str:
    """Return what the layers have, if they are not all attention and an MLP; else nothing."""
    if not (shape.pattern or shape.parts):
        return ""
    counted = Counter[str]()
    for kind, count in shape.kinds or ((shape, shape.layers),):
        counted[_kind(kind)] += count
    if len(counted) == 1:
        return f" ({next(iter(counted))})"
    return f" ({', '.join(f'{count} {words}' for words, count in counted.items())})"


def _kind(layer: Shape) -> str:
    """Return what one layer has: ``Mamba-2 + experts``."""
    words = ["attention"] if layer.heads else []
    words += [part.short for part in layer.parts if part.short]
    if layer.ffn_hidden:
        words.append("experts" if layer.experts else "MLP")
    return " + ".join(words)


def _split(candidate: Candidate) -> str:
    shape, layout, cluster = candidate.shape, candidate.layout, candidate.cluster
    steps: list[str] = []
    unit = cluster.gpu.unit
    if layout.tensor > 1:
        inside = layout.tensor <= cluster.gpus_per_host and cluster.hosts > 1
        steps.append(
            f"split each layer over {counted(layout.tensor, unit)}{' of one host' * inside}"
        )
    if layout.pipeline > 1:
        each = shape.layers / layout.pipeline
        size = f"{each:.0f}" if each.is_integer() else f"about {each:.0f}"
        pieces = layout.virtual_pipeline
        interleaved = f", interleaved as {pieces} pieces each" if pieces > 1 else ""
        steps.append(
            f"cut the {shape.layers:,} layers into {layout.pipeline:,} pipeline stages of "
            f"{size}{interleaved}"
        )
    if layout.context > 1:
        steps.append(
            f"split each sequence over {counted(layout.context, unit)} (context parallelism)"
        )
    if layout.tensor > 1 and candidate.assumed.spreads_experts(shape, layout):
        over = layout.expert * layout.tensor
        split = f"{layout.expert} x {layout.tensor} tensor ranks; no expert is split"
        steps.append(f"spread the {shape.experts} experts over {counted(over, unit)} ({split})")
    elif layout.expert > 1:
        steps.append(f"spread the {shape.experts} experts over {counted(layout.expert, unit)}")
    ranks = layout.copies
    if layout.data > 1 or (ranks > 1 and layout.sharding != "none"):
        steps.append(_replicas(layout, counted(ranks, unit), split=layout.world_size > layout.data))
    if not steps:
        verb = "Train" if shape.lora is None else "Keep"
        where = f"{'in' if cluster.gpu.is_cpu else 'on'} one {unit}"
        adapters = "" if shape.lora is None else ", and train its adapters"
        return f"{verb} the whole model {where}{adapters}."
    text = steps[0] if len(steps) == 1 else f"{', '.join(steps[:-1])}, and {steps[-1]}"
    return f"{text[0].upper()}{text[1:]}."


def _replicas(layout: Layout, devices: str, *, split: bool) -> str:
    """Describe what the data ranks do; ``devices``: their number and unit; ``split``: whether each
    has more than one of them."""
    ranks = layout.copies
    if layout.shards_parameters:
        over = f"{ranks:,} such groups" if split and layout.context == 1 else devices
        how = "(FSDP, ZeRO-3)"
        if layout.sharding == "hybrid":
            over = f"{layout.shards:,} of {over}"
            how = f"and keep {ranks // layout.shards:,} copies of that (HSDP)"
        return f"shard parameters, gradients and optimizer over {over} {how}"
    over = f" over {devices}" if ranks != layout.data else ""
    shared = {
        "none": "",
        "optimizer": f"optimizer states{over} (ZeRO-1)",
        "gradients": f"gradients and optimizer states{over} (ZeRO-2)",
    }[layout.sharding]
    if layout.data == 1:
        return f"shard {shared}"
    run = f"run {layout.data:,} replicas of that" if split else f"copy the model to {devices}"
    return f"{run}, which shard their {shared}" if shared else f"{run} (DDP)"


def _steps(layout: Layout) -> str:
    of = counted(layout.micro_batch, "sequence")
    whose = " on each replica" if layout.data > 1 else ""
    if layout.grad_accumulation == 1:
        return f"A step is one micro-batch of {of}{whose}."
    return f"Use micro-batches of {of}, {layout.grad_accumulation:,} of them a step{whose}."


def _savings(candidate: Candidate) -> Iterator[str]:
    layout = candidate.layout
    cheap = "cheap operations"
    if candidate.assumed.recomputes_modules(candidate.shape, layout):
        dropped = ["norms"]
        dropped += ["the experts' activation"] if candidate.shape.experts else []
        dropped += ["MLA's up projections"] if candidate.shape.kv_rank else []
        cheap = either(dropped, "and")
    yield {
        "none": "Nothing is recomputed.",
        "selective": f"Recompute only {cheap} in the backward pass (selective recompute).",
        "full": "Recompute every layer in the backward pass (full recompute).",
    }[layout.recompute]
    if layout.offload:
        yield from _offloaded(candidate)


def _offloaded(candidate: Candidate) -> Iterator[str]:
    layout, cluster, host = candidate.layout, candidate.cluster, candidate.hosted
    known = not without_backend(cluster.gpu)
    what = "parameters, gradients and optimizer states"
    if candidate.assumed.habits.offloads != "all":
        what = "the optimizer's states, with a copy of the gradients,"
    where, each = ("hosts'", " on each host") if cluster.hosts > 1 else ("host's", "")
    size = f"{gib(host.total)}{each}"
    size += f", of which PyTorch pins {gib(host.pinned)}" if known else ""
    yield f"Keep {what} in the {where} memory (offload): {size}."
    if not candidate.fits_host:
        gpus = f"{min(cluster.gpus, cluster.gpus_per_host)} × {cluster.gpu.name}"
        yield f"The usual host of {gpus} has only {host_room(candidate)}."
    if known and backend_of(layout).runtime_memory:
        yield "The time assumes `AdamW(…, fused=True)`."


def host_room(candidate: Candidate) -> str:
    """``115.2 GiB for this (128.0 GiB, less 10 %)``: of the usual host of the GPUs."""
    of = f"{gib(candidate.cluster.host_memory)}, less {percent(HOST_HEADROOM)}"
    return f"{gib(candidate.host_limit)} for this ({of})"


def figures(candidate: Candidate) -> str:
    """Return the speed and its interval in one sentence, with both definitions of MFU."""
    speed, gpus, unit = candidate.speed, candidate.cluster.gpus, candidate.cluster.gpu.unit
    low, high = map(seconds, candidate.interval)
    return (
        f"A step of {counted(candidate.layout.global_batch, 'sequence')} takes "
        f"{seconds(candidate.time.total)}, {low} to {high} with 80 % confidence: "
        f"{amount(speed.tokens_per_s_per_gpu)} tokens/s on each {unit} "
        f"({amount(speed.tokens_per_s_per_gpu * gpus)} on all), "
        f"{tflops(speed.model_tflops_per_gpu)} model TFLOP/s per {unit}{_utilization(candidate)}."
    )


def _utilization(candidate: Candidate) -> str:
    """Return the share of the peak that a step uses; empty if the peak was measured."""
    speed = candidate.speed
    if candidate.cluster.gpu.is_cpu:
        return ""
    text = f", MFU {percent(speed.mfu)} (non-causal attention; {percent(speed.mfu_causal)} causal)"
    if speed.hfu > speed.mfu:
        text += f", HFU {percent(speed.hfu)} ({percent(speed.hfu_causal)} causal)"
    return text


def fullness(candidate: Candidate) -> str:
    """Compare memory with the limit, in one sentence."""
    total, limit, gpu = candidate.memory.total, candidate.limit, candidate.cluster.gpu
    room = f"{gib(limit)} usable ({gib(gpu.memory)}, less {HEADROOM * 100:.0f} % headroom)"
    if candidate.fits:
        low, high = map(gib, candidate.memory_interval)
        return (
            f"The fullest {gpu.unit} needs {gib(total)}, {low} to {high} with 80 % confidence, of "
            f"{room}."
        )
    return f"The fullest {gpu.unit} needs {gib(total)}: {gib(total - limit)} more than its {room}."


def brief(candidate: Candidate) -> str:
    """``tensor 4 x pipeline 4 x data 4, ZeRO-1``."""
    layout = candidate.layout
    text = layout.product(layout.split_by()) or f"one {candidate.cluster.gpu.unit}"
    if layout.expert > 1:
        text += f", experts over {layout.expert}"
    if layout.sharding != "none":
        text += f", {SHARDING[layout.sharding]}"
    if layout.recompute != "none":
        text += f", {layout.recompute} recompute"
    return text + (", optimizer offloaded" if layout.offload else "")


def columns(candidates: Sequence[Candidate]) -> dict[str, list[str]]:
    """Return a table of layouts by column, without columns that carry no information."""
    layouts = [candidate.layout for candidate in candidates]
    every: dict[str, Sequence[object]] = {
        "tensor": [layout.tensor for layout in layouts],
        "pipeline": [layout.pipeline for layout in layouts],
        "pieces": [layout.virtual_pipeline for layout in layouts],
        "context": [layout.context for layout in layouts],
        "expert": [layout.expert for layout in layouts],
        "data": [layout.data for layout in layouts],
        "sharding": [SHARDING[layout.sharding] for layout in layouts],
        "batch": [f"{layout.micro_batch}×{layout.grad_accumulation}" for layout in layouts],
        "recompute": [layout.recompute for layout in layouts],
        "offload": ["yes" if layout.offload else "no" for layout in layouts],
        "GiB": [f"{one.memory.total:,.1f}" for one in candidates],
        "step": [seconds(one.time.total) for one in candidates],
    }
    optional = ("pieces", "context", "expert", "sharding", "recompute", "offload")
    return {
        title: [*map(str, values)]
        for title, values in every.items()
        if title not in optional or {*values} - {1, "none", "no"}
    }


def order(candidates: Sequence[Candidate]) -> str:
    """Return how the layouts of a table are ordered."""
    extra = ["4 % for each split of layers or sequences", "3 % for memory more than 93 % full"]
    if any(one.layout.offload for one in candidates):
        extra.append("50 % for offload")
    return f"by time, plus {either(extra, 'and')}"
