"""What would make a model fit that does not fit as asked."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

from dtrain.parallelism.answer.alternatives import other_backend, unconstrained
from dtrain.parallelism.answer.explain import brief, host_room
from dtrain.parallelism.answer.units import gib, seconds
from dtrain.parallelism.backends import BACKENDS, without_backend
from dtrain.parallelism.cluster.hardware import MAX_GPUS, Gpu, GpuCluster, Precision
from dtrain.parallelism.constraints import divisors
from dtrain.parallelism.cost.candidate import Candidate
from dtrain.parallelism.model.adapters import Lora
from dtrain.parallelism.question import Answer, Question
from dtrain.parallelism.search import compared_time, rank_key
from dtrain.runtime.layout import BackendName
from dtrain.wording import counted, either

SHORTEST = 1024
"""Least tokens of a sequence that are suggested."""
LESS_MEMORY = {"recompute": "full", "sharding": "full", "micro_batch": 1, "offload": True}
"""Values of constraints that need less memory than others."""
MOST_TIMES = 4
"""Most times as many GPUs that are suggested instead of offload."""
LOSS_CHUNKS = 8
"""Parts of a sequence whose logits torchtitan's ``ChunkedCELoss`` computes one after the other, by
default (``num_chunks`` in ``components/loss.py``, its pull request 2937)."""


def remedies(answer: Answer) -> tuple[str, ...]:
    """Return changes that would make the model fit, one sentence each, all verified by a search.

    If no layout fits; and if the optimizer is offloaded, changes that keep it on the GPUs.
    """
    question = answer.question
    fixed = question.fixed
    if answer.fits and (
        not answer.best.layout.offload or "offload" in fixed or answer.plan.on_gpus.best
    ):
        return ()
    free = None if answer.fits else unconstrained(answer)
    found = []
    if not answer.fits:
        found += [*_without_constraints(question, free)]
        found += [_shorter_sequences(question), _in_fewer_bits(question)]
        found.append(_fewer_adapters(question))
        found.append(_only_adapters(question))
        if not fixed.get("offload"):
            found.append(_offload(question))
    # Offload is better than what takes much longer.
    most = compared_time(answer.best) if answer.fits else math.inf
    found += [_narrow_states(question, most), _chunked_loss(question, most)]
    if free is None:
        found += [_more_gpus(question, most), _other_gpu(question, most)]
    return tuple(sentence for sentence in found if sentence)


def _without_constraints(question: Question, free: Candidate | None) -> Iterator[str]:
    """Yield what fits with one constraint less, but for offload; and without any: ``free``, unless
    one less has the same layout."""
    enough = False
    for field, value in LESS_MEMORY.items():
        if question.fixed.get(field, value) != value:
            one = question.fastest(**{field: value})
            enough |= bool(free and one and one.layout == free.layout)
            if field != "offload":
                yield _fits(f"With `{field}={value!r}`", one)
    if not enough:
        yield _fits("Without the constraints", free)


def _fits(change: str, one: Candidate | None, most: float = math.inf) -> str:
    """Say that a layout fits after a ``change``; '' if there is none with steps of at most ``most``
    seconds."""
    if one is None or one.time.total > most:
        return ""
    return (
        f"{change}, {brief(one)} fits: {gib(one.memory.total)}, {seconds(one.time.total)} a step."
    )


def _shorter_sequences(question: Question) -> str:
    """Find the longest sequences that fit, in a step of as many tokens."""
    choices = [*_halved(question)]
    # If the shortest that a layout can split do not fit, no others do.
    split = (one for one in reversed(choices) if one.search().considered or one.others)
    shortest = next(split, None)
    if shortest is None or shortest.planned() is None:
        return ""
    for shorter in choices:
        one = shorter.planned()
        if one is not None:
            sizes = f"`seq_len={shorter.shape.seq_len}`", f"`global_batch={shorter.global_batch}`"
            changes = filter(None, (*sizes, other_backend(question, one)))
            return _fits(f"With {either(changes, 'and')}", one)
    return ""


def _halved(question: Question) -> Iterator[Question]:
    """Yield the question for sequences of a half, a quarter … of the length, with as many
    tokens."""
    shape, parts = question.shape, 2
    # An image has as many patches as it has.
    while not shape.input_parameters and shape.seq_len % parts == 0:
        length, batch = shape.seq_len // parts, question.global_batch * parts
        if length < SHORTEST:
            break
        shorter = shape.with_lengths(length, shape.vocab)
        yield replace(question, shape=shorter, global_batch=batch)
        parts *= 2


def _in_fewer_bits(question: Question) -> str:
    """Find a layout that fits if frozen weights have 4 bits."""
    shape = question.shape
    if shape.lora is None or shape.lora.base_bits == 4:
        return ""
    fewer = replace(shape, lora=replace(shape.lora, base_bits=4))
    software = "" if question.backend == "torchtitan" else " and `backend='torchtitan'`"
    one = replace(question, shape=fewer, backend="torchtitan").fastest()
    return _fits(f"With `base_bits=4` (QLoRA){software}", one)


def _fewer_adapters(question: Question) -> str:
    """Find a layout that fits if only attention's matrices have adapters: experts have many."""
    shape = question.shape
    if shape.lora is None or shape.lora.targets == "attention":
        return ""
    fewer = replace(shape, lora=replace(shape.lora, targets="attention"))
    return _fits("With `lora_targets='attention'`", replace(question, shape=fewer).fastest())


def _narrow_states(question: Question, most: float) -> str:
    """Find a layout that fits, with the optimizer on the GPUs, if all states have 16 bits. For
    ``most`` see `_fits`."""
    if question.narrow_states or question.precision != "bf16" or question.shape.lora is not None:
        return ""
    narrow = replace(question, narrow_states=True, backend="torchtitan")
    one = narrow.fastest(**{**question.fixed, "offload": False})
    wanted = ["`state_bits=16`"]
    if question.backend_required and question.backend != "torchtitan":
        wanted.append("`backend='torchtitan'`")
    return _fits(
        f"To fine-tune with weights and Adam's states in bf16, with {' and '.join(wanted)}",
        one,
        most,
    )


def _only_adapters(question: Question) -> str:
    """Find a layout that fits if only adapters of the frozen model are trained."""
    shape = question.shape
    if shape.lora is not None or shape.every_part or shape.pattern:
        return ""
    softwares: tuple[tuple[Literal[16, 4], BackendName], ...] = (16, "megatron"), (4, "torchtitan")
    for bits, backend in softwares:
        frozen = replace(shape, lora=Lora(16, "all", bits))
        one = replace(question, shape=frozen, backend=backend).fastest()
        if one is not None:
            wanted = ["`lora_rank=16`", *(["`base_bits=4`"] if bits == 4 else [])]
            if question.backend_required and question.backend != backend:
                wanted.append(f"`backend={backend!r}`")
            return _fits(f"To fine-tune only adapters, with {' and '.join(wanted)}", one)
    return ""


def _chunked_loss(question: Question, most: float) -> str:
    """Find the fastest layout that does not fit only because its logits all exist at once. With
    offload if none does without, unless layouts with offload fit already: then a step takes at most
    ``most`` seconds."""
    inside = replace(question, backend="torchtitan")
    choices = [False, True] if most == math.inf else [False]
    if "offload" in question.fixed:
        choices = [question.fixed["offload"]]
    for offload in choices:
        examples = (group.example for group in inside.search(offload=offload).rejected)
        chunked = (
            replace(one, assumed=replace(one.assumed, loss_chunks=LOSS_CHUNKS)) for one in examples
        )
        fitting = (one for one in chunked if one.fits and one.fits_host)
        one = min(fitting, key=rank_key, default=None)
        if one is not None:
            break
    software = "" if without_backend(question.cluster.gpu) else " (torchtitan's `ChunkedCELoss`)"
    return _fits(
        f"With a loss that computes the logits of {LOSS_CHUNKS} parts of a sequence one after the "
        f"other{software}",
        one,
        most,
    )


def _offload(question: Question) -> str:
    """Say what offload, which is not fixed, would change."""
    if not question.cluster.gpu.has_host:
        return ""
    one = replace(question, fixed={**question.fixed, "offload": True}).planned()
    if one is None:
        examples = [group.example for group in question.search(offload=True).rejected]
        least = min(examples, key=lambda one: one.memory.total, default=None)
        if least is None:
            return ""
        return (
            f"Offload is not enough: with it, {brief(least)} still needs {gib(least.memory.total)}."
        )
    changes = either(filter(None, ("`offload=True`", other_backend(question, one))), "and")
    if one.fits_host:
        return _fits(f"With {changes}", one)
    needed, has = gib(one.hosted.total), host_room(one)
    return _fits(
        f"Offload needs {needed} on each host, and the usual one has {has}: with {changes}", one
    )


def _more_gpus(question: Question, most: float) -> str:
    """Find the fewest GPUs of this kind on which the model fits, among counts that divide well. For
    ``most`` see `_fits`: more than `MOST_TIMES` as many GPUs are no alternative to offload.

    A single host may get more GPUs, up to the usual number.
    """
    cluster = question.cluster
    per_host = cluster.gpus_per_host
    usual = question.hardware.machine(cluster.gpu.machine).gpus_per_host
    if cluster.hosts == 1 and usual % per_host == 0:
        per_host = usual
    for gpus in _counts(cluster.gpus, per_host):
        if most < math.inf and gpus > MOST_TIMES * cluster.gpus:
            break
        wider = replace(cluster, gpus=gpus, gpus_per_host=min(per_host, gpus))
        one = _leanest(question, wider)
        if one is not None and one.time.total <= most:
            hosts = counted(wider.hosts, "host")
            return _suffices(
                f"{gpus:,} x {cluster.gpu.name} ({hosts} of {wider.gpus_per_host})", question, one
            )
    return ""


def _counts(gpus: int, per_host: int) -> Iterator[int]:
    """Yield larger numbers of GPUs: shares of one host, then whole hosts, 1.5, 2, 3, 4, 6 … times
    ``gpus``, up to `MAX_GPUS`."""
    unit = max(per_host, gpus)
    yield from (size for size in divisors(unit) if size > gpus)
    for power in range(1, 12):
        half = 3 * unit * 2**power // 4
        if unit * 2**power > MAX_GPUS:
            break
        if half % per_host == 0 and half > gpus:
            yield half
        yield unit * 2**power


def _leanest(question: Question, cluster: GpuCluster) -> Candidate | None:
    """Find a layout that fits on another cluster, among layouts that need little memory. Ignores
    the constraints, which may not suit other GPUs."""
    free = replace(question, fixed={}, cluster=cluster)
    shape = question.shape
    each: float = 8 if question.narrow_states else 16
    if shape.lora is not None:
        each = shape.frozen_matrix_bytes or 2
    floor = each * shape.parameters / 2**30 / cluster.gpus
    if floor > cluster.gpu.memory:
        return None
    return _first(free, offload=False, micro_batch=1, recompute="full")


def _first(question: Question, **fixed: Any) -> Candidate | None:
    """Find a layout that fits, for the question's backend if there is one. A plan may be for
    another backend if none does, unless the question names one."""
    others = () if question.backend_required else BACKENDS
    for name in dict.fromkeys((question.backend, *others)):
        one = replace(question, backend=name).fastest(**fixed)
        if one is not None:
            return one
    return None


def _other_gpu(question: Question, most: float) -> str:
    """Find the GPU with the least memory on which the model fits, with the same number of GPUs; the
    fastest one of those with about as much. For ``most`` see `_fits`."""
    cluster, usual = question.cluster, question.cluster.gpu.usual
    each = " each" if cluster.gpus > 1 else ""
    larger = [gpu for gpu in question.hardware.gpus if _like(gpu, cluster.gpu, question)]
    for gpu in sorted(larger, key=lambda gpu: (round(gpu.memory, -1), -gpu.flops.get(usual, 0.0))):
        there = replace(question, precision=_precision(gpu, question))
        one = _leanest(there, replace(cluster, gpu=gpu))
        if one is not None and one.time.total <= most:
            name = f"{cluster.gpus:,} x {gpu.name}, with {gpu.memory:.0f} GiB{each},"
            return _suffices(name, question, one)
    return ""


def _precision(gpu: Gpu, question: Question) -> Precision:
    """Return the precision on another GPU: a plan for it has bf16 again if that was missing."""
    now = question.cluster.gpu
    return gpu.usual if question.precision == now.usual else question.precision


def _suffices(gpus: str, question: Question, one: Candidate) -> str:
    backend = other_backend(question, one)
    condition = f" with {backend}" if backend else ""
    return (
        f"{gpus} would suffice{condition}: {brief(one)}, {gib(one.memory.total)}, at most "
        f"{seconds(one.time.total)} a step."
    )


def _like(gpu: Gpu, now: Gpu, question: Question) -> bool:
    machine = question.hardware.machine
    usual = min(question.cluster.gpus_per_host, machine(now.machine).gpus_per_host)
    return (
        gpu.memory > now.memory * 1.05
        and _precision(gpu, question) in gpu.flops
        and gpu.maker == now.maker
        and not gpu.custom
        # Racks are not sold as single GPUs, and a GH200 has a host of its own.
        and (not gpu.domain or now.domain > 0)
        and machine(gpu.machine).gpus_per_host >= usual
    )
