"""Other layouts, and why they are worse."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from itertools import islice
from math import gcd, isclose
from typing import Any

from dtrain.parallelism.answer.explain import MEMORY_PARTS, TIME_PARTS, brief
from dtrain.parallelism.answer.units import both, faster, gib, percent, seconds, slower
from dtrain.parallelism.backends import BACKENDS, backend_of, without_backend
from dtrain.parallelism.constraints import divisors
from dtrain.parallelism.cost.candidate import CLOSE, RAN_OUT, ROOMY, Candidate
from dtrain.parallelism.cost.memory import Memory
from dtrain.parallelism.model.further import most_stages
from dtrain.parallelism.question import Answer, Question
from dtrain.parallelism.search import Plan, compared_time
from dtrain.records import dataclass
from dtrain.runtime.layout import Layout
from dtrain.wording import counted, plural

LOOKED_AT = 100
"""Best layouts of which one may be the reserve."""
NEAR = 0.25
"""Most by which a batch that is suggested differs from the given one, as a share of it."""
WORTH = 0.02
"""Smaller gains of a backend, as shares of a step, are not shown: the estimates' error is
larger."""


@dataclass(frozen=True, slots=True)
class Rival:
    """A plausible alternative layout, and why the planner does not choose it."""

    name: str
    candidate: Candidate
    verdict: str

    @property
    def sentence(self) -> str:
        return f"{self.name} ({brief(self.candidate)}): {self.verdict}"


def textbook(answer: Answer) -> str:
    """Explain why the model cannot be split inside each host and copied across hosts; '' if it can.

    Considers the smallest such layout: one sequence at a time, every layer recomputed.
    """
    question = answer.question
    cluster, shape = question.cluster, question.shape
    if cluster.hosts == 1 or cluster.gpus_per_host == 1:
        return ""
    inside = cluster.gpus_per_host
    leanest = Layout(
        backend=question.backend,
        data=cluster.hosts,
        recompute="full",
        grad_accumulation=max(1, question.global_batch // cluster.hosts),
    )
    candidates = [
        question.candidate(
            replace(leanest, tensor=tensor, pipeline=inside // tensor, sequence_parallel=tensor > 1)
        )
        for tensor in divisors(inside)
        if not any(unit % tensor for unit in shape.tensor_units)
        and inside // tensor <= most_stages(shape)
    ]
    least = min(candidates, key=lambda one: one.memory.total, default=None)
    if least is None or least.fits:
        return ""
    need, limit, unit = least.memory, cluster.gpu.memory, cluster.gpu.unit
    kept = need.parameters + need.gradients + need.optimizer
    split = least.layout.product(least.layout.split_by(("tensor", "pipeline")))
    states = "parameters, gradients and Adam's states"
    if shape.lora is not None:
        states = "the frozen model and the adapters' states"
    hosts = "both" if cluster.hosts == 2 else f"all {cluster.hosts:,}"
    why = f": {states} alone are {both(kept)}, the same on every host"
    if kept < limit:
        why = f", with {_most(need)}"
    text = (
        f"Splitting the model only inside each host ({split}) and copying it to {hosts} hosts, the "
        f"textbook answer, needs {both(need.total)} on each {unit}{why}, and a {unit} has "
        f"{gib(limit)}."
    )
    if answer.fits:
        text += f" What fits instead: {brief(answer.best)}, {gib(answer.best.memory.total)}."
    return text


def reserve(answer: Answer) -> str:
    """Say how often layouts that are as full as the best one run out of memory, and name the layout
    to take then, if one needs clearly less; '' if that is improbable.

    Trials have shown whether the best one fits.
    """
    best = answer.best
    if not answer.fits or answer.trials or best.has_room or best.cluster.gpu.is_cpu:
        return ""
    failed, all_runs = RAN_OUT
    risk = f"Of {all_runs} published runs with an estimate as full, {failed} ran out of memory."
    # Such a layout also has room on the GPU, as the best one fits.
    most = ROOMY * best.memory.total
    roomy = [one for one in islice(answer.plan.ranked(), LOOKED_AT) if one.memory.total <= most]
    if not roomy:
        return risk
    spare = min(roomy, key=lambda one: one.time.total)
    ratio = spare.time.total / best.time.total
    compared = slower(ratio) if ratio >= 1 else faster(1 / ratio)
    return (
        f"{risk} If this one does, take {brief(spare)}, with micro-batches of "
        f"{counted(spare.layout.micro_batch, 'sequence')}: {gib(spare.memory.total)}, "
        f"{seconds(spare.time.total)} a step ({compared})."
    )


def rivals(answer: Answer) -> tuple[Rival, ...]:
    """Return the best layout of each plausible kind, except the kind of the best layout.

    A kind that does not fit is represented by its smallest layout.
    """
    best, found = answer.best, [*_one_host(answer)]
    seen = {_kind(best.layout)}
    for name, plan in _kinds(answer):
        candidate = plan.best
        if candidate is None:
            if not plan.rejected:
                continue
            examples = (group.example for group in plan.rejected)
            candidate = min(examples, key=lambda one: one.memory.total)
        if _kind(candidate.layout) in seen:
            continue
        seen.add(_kind(candidate.layout))
        candidate = answer.corrected(candidate)
        found.append(Rival(name, candidate, _verdict(candidate, best)))
    # Fitting layouts first, each group ordered by distance from the best.
    return tuple(
        sorted(
            found,
            key=lambda one: (
                not one.candidate.fits,
                one.candidate.time.total if one.candidate.fits else one.candidate.memory.total,
            ),
        )
    )


def _one_host(answer: Answer) -> Iterator[Rival]:
    """Yield one host alone, if it is faster than all hosts with their network. It has the same
    constraints: what they cost is no fault of the network."""
    question, best = answer.question, answer.best
    cluster = question.cluster
    # One host computes about as long as all of them, times their number: no less than half of that,
    # with less recomputation and larger products.
    computing = best.time.compute + best.time.recompute
    if not answer.fits or cluster.hosts == 1 or best.time.total < computing * cluster.hosts / 2:
        return
    alone = replace(cluster, gpus=cluster.gpus_per_host, rack_hosts=0)
    one = replace(question, cluster=alone).fastest()
    if one is not None and one.time.total < best.time.total:
        ratio = best.time.total / one.time.total
        verdict = (
            f"{faster(ratio)}, {seconds(one.time.total)} a step, because the network between the "
            f"hosts is slow; with {gib(one.memory.total)}."
        )
        yield Rival("One host alone", one, verdict)


def _kind(layout: Layout) -> tuple[object, ...]:
    return (
        layout.tensor, layout.pipeline, layout.context, layout.expert, layout.sharding,
        layout.recompute == "full", layout.offload,
    )  # fmt: skip


def _kinds(answer: Answer) -> Iterator[tuple[str, Plan]]:
    """Yield common kinds of layouts, with the plan of those that have the kind's fields."""
    question, layout = answer.question, answer.best.layout
    cluster, fixed = question.cluster, question.fixed
    alone = {"tensor": 1, "pipeline": 1, "context": 1}
    inside = cluster.gpus_per_host
    kinds: list[tuple[str, dict[str, Any]]] = []
    if layout.offload:
        name = f"The optimizer on the {plural(cluster.gpus, cluster.gpu.unit)}"
        yield name, answer.plan.on_gpus
    if cluster.gpus > 1:
        kinds += [
            ("Plain DDP", {**alone, "sharding": "none"}),
            ("ZeRO-1 alone", {**alone, "sharding": "optimizer"}),
            ("FSDP alone", {**alone, "sharding": "full"}),
            ("HSDP alone", {**alone, "sharding": "hybrid"}),
        ]
        # The most stages that divide the layers.
        deepest = gcd(cluster.gpus, question.shape.layers)
        stages = {"tensor": 1, "context": 1, "pipeline": deepest}
        kinds.append(("A pipeline without tensor", stages))
    if inside > 1:
        kinds.append(("Tensor without a pipeline", {"tensor": inside, "pipeline": 1, "context": 1}))
    if layout.tensor * 2 <= inside:
        kinds.append(("More tensor", {"tensor": layout.tensor * 2, "context": 1}))
    if layout.tensor > 1 and layout.tensor % 2 == 0:
        kinds.append(("Less tensor", {"tensor": layout.tensor // 2, "context": 1}))
    same: dict[str, Any] = {
        "tensor": layout.tensor, "pipeline": layout.pipeline, "context": layout.context,
        "offload": layout.offload,
    }  # fmt: skip
    if layout.context > 1:
        kinds.append(("No context parallelism", {"context": 1}))
    if layout.recompute == "full":
        kinds.append(("Less recompute", {**same, "recompute": "none"}))
    else:
        kinds.append(("Full recompute", {**same, "recompute": "full"}))
    for name, wanted in kinds:
        if all(fixed.get(key, value) == value for key, value in wanted.items()):
            yield name, question.search(**{"offload": False, **fixed, **wanted})


def _verdict(rival: Candidate, best: Candidate) -> str:
    if not rival.fits:
        total, limit = rival.memory.total, rival.limit
        spent = _most(rival.memory)
        return f"does not fit: it needs at least {gib(total)} of {gib(limit)}, with {spent}."
    if not best.fits:
        return f"fits, with {gib(rival.memory.total)}."
    ratio = rival.time.total / best.time.total
    if ratio < 1 and percent(1 - ratio) != "0.0 %":
        why = "but not worth the added complexity"
        if best.has_room and not rival.has_room:
            why = "which leaves too little room for the estimate's error"
        return f"only {percent(1 - ratio)} faster, with {gib(rival.memory.total)}, {why}."
    more = {
        part.name: getattr(rival.time, part.name) - getattr(best.time, part.name)
        for part in fields(rival.time)
    }
    spent = ", ".join(
        f"+{seconds(value)} {TIME_PARTS[name]}"
        for name, value in _two_largest(more)
        # A trial measures the whole step, not its parts.
        if value > 0.001 * best.time.total and isclose(rival.slowdown, best.slowdown)
    )
    return (
        f"{slower(ratio)}, {seconds(rival.time.total)} a step"
        f"{f' ({spent})' if spent else ''}, with {gib(rival.memory.total)}."
    )


def _most(memory: Memory) -> str:
    """Return what takes most of the memory: ``20 GiB logits and 8.1 GiB activations``."""
    parts = _two_largest({name: getattr(memory, name) for name in MEMORY_PARTS})
    return " and ".join(f"{gib(value)} {MEMORY_PARTS[name]}" for name, value in parts)


def _two_largest(parts: Mapping[str, float]) -> list[tuple[str, float]]:
    ranked = sorted(parts.items(), key=lambda item: item[1], reverse=True)
    return [(name, value) for name, value in ranked[:2] if value > 0]


def reasons(answer: Answer) -> list[str]:
    """Return why the textbook's layout is not the answer, and what the constraints cost."""
    texts = [] if answer.question.pinned else [textbook(answer)]
    if answer.fits:
        texts += [cost_of_constraints(answer), other_batch(answer)]
    return [text for text in texts if text]


def cost_of_constraints(answer: Answer) -> str:
    """Describe what the fixed sizes cost compared with the planner's choice; '' without any."""
    other = unconstrained(answer)
    if other is None:
        return ""
    gain = answer.best.time.total / other.time.total - 1
    if gain < 0.005:
        return "The constraints cost nothing: without them, the planner finds no faster layout."
    return (
        f"Without the constraints, {brief(other)} would take {seconds(other.time.total)} a step: "
        f"the constraints cost {percent(gain)}."
    )


def other_batch(answer: Answer) -> str:
    """Name the nearest batch that all GPUs divide, if they are clearly faster with it; '' if not.
    They may have to split layers only because they do not divide the batch."""
    question, best = answer.question, answer.best
    gpus, batch = question.cluster.gpus, question.global_batch
    near = max(1, round(batch / gpus)) * gpus
    if answer.trials or near == batch or abs(near - batch) > NEAR * batch:
        return ""
    other = replace(question, global_batch=near).planned()
    if other is None:
        return ""
    gain = other.speed.tokens_per_s_per_gpu / best.speed.tokens_per_s_per_gpu
    if gain - 1 < CLOSE:
        return ""
    backend = other_backend(question, other)
    condition = f" with {backend}" if backend else ""
    return (
        f"With a batch of {counted(near, 'sequence')}, a multiple of the "
        f"{question.cluster.devices}, a token takes {percent(1 - 1 / gain)} less time{condition}: "
        f"{brief(other)}, {seconds(other.time.total)} a step."
    )


def other_backend(question: Question, one: Candidate) -> str:
    """Name the backend of a layout; '' if it is the question's."""
    name = one.layout.backend
    unnamed = name == question.backend or without_backend(one.cluster.gpu)
    return "" if unnamed else f"`backend={name!r}`"


def unconstrained(answer: Answer) -> Candidate | None:
    """Return the planner's choice without the constraints; None without any, or if nothing fits."""
    if not answer.question.fixed:
        return None
    other = replace(answer.question, fixed={}).fastest()
    return None if other is None or answer.ruled_out(other) else answer.corrected(other)


def hidden_exchange(answer: Answer) -> str:
    """Return one line on the time that a step takes if exchanges between experts run beside the
    computation; '' if that is no large gain, or the backend cannot. If they do already, a line on
    a faster layout without; '' if there is none."""
    best, question = answer.best, answer.question
    if not answer.fits or not backend_of(best.layout).hides_exchange:
        return ""
    if question.hides_exchange:
        other = replace(question, hides_exchange=False).fastest()
        if other is None or other.time.total >= best.time.total:
            return ""
        return (
            f"without `overlap_experts`, which does not go with full recompute, {brief(other)} "
            f"would take {seconds(other.time.total)} a step"
        )
    hidden = replace(best, assumed=replace(best.assumed, hides_exchange=True))
    gain = best.time.total / hidden.time.total
    if gain - 1 < CLOSE or best.layout.recompute == "full" or without_backend(question.cluster.gpu):
        return ""
    share = percent(best.time.expert / best.time.total)
    return (
        f"exchanges between experts take {share} of a step: software that computes meanwhile "
        f"(Megatron-LM's `{BACKENDS['megatron'].hides_exchange}`, DualPipe) would take "
        f"{seconds(hidden.time.total)} for this layout; plan for it with `overlap_experts`"
    )


def whole_graph(answer: Answer) -> str:
    """Return one line on the time that a step takes as one CUDA graph; '' if that is no large gain,
    or the backend cannot."""
    best, question = answer.best, answer.question
    setting = backend_of(best.layout).one_graph
    other_device = without_backend(question.cluster.gpu)
    if not (answer.fits and setting) or question.one_graph or other_device:
        return ""
    graph = replace(best, assumed=replace(best.assumed, one_graph=True))
    if best.time.total / graph.time.total - 1 < CLOSE:
        return ""
    return (
        f"GPUs wait for their hosts in {percent(best.time.host / best.time.total)} of a step: "
        f"software with one CUDA graph of the whole step (Megatron-LM's `{setting}`) would take "
        f"{seconds(graph.time.total)} for this layout; plan for it with `cuda_graph`"
    )


def faster_backend(answer: Answer) -> str:
    """Return one line on the fastest other backend; '' if none is faster."""
    question = answer.question
    chosen = question.backend != "runtime" and not question.backend_required
    # A backend that the planner has chosen is the fastest.
    best = None if chosen or not question.others else question.others[0].best
    if best is None or without_backend(question.cluster.gpu):
        return ""
    name = best.layout.backend
    # What a trial has corrected may be true of all software.
    total = best.time.total * answer.best.slowdown
    title = BACKENDS[name].title
    what = f"`backend={name!r}`" + (f" ({title})" if title != name else "")
    if not answer.fits:
        return f"{what} fits: {brief(best)}, {seconds(total)} a step"
    ratio = answer.best.time.total / total
    longer = compared_time(best) * answer.best.slowdown >= compared_time(answer.best)
    if ratio - 1 < WORTH or longer:
        return ""
    return f"{what} would be {faster(ratio)}: {brief(best)}, {seconds(total)} a step"
