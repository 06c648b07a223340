"""The planner's question, and the answer that all views of a plan use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field, replace
from functools import cached_property
from typing import Any, Literal

from dtrain.diagnostics import UsageError
from dtrain.parallelism import constraints
from dtrain.parallelism.assumptions import Assumptions
from dtrain.parallelism.backends import BACKENDS, refusals, without_backend
from dtrain.parallelism.cluster.efficiency import Efficiency
from dtrain.parallelism.cluster.hardware import GpuCluster, Hardware, Precision, hardware
from dtrain.parallelism.cluster.probe import Probe
from dtrain.parallelism.cost.candidate import Candidate
from dtrain.parallelism.model.shape import Shape
from dtrain.parallelism.reliability import FailureCost, Reliability, cost
from dtrain.parallelism.search import Plan, candidates, fastest, search
from dtrain.parallelism.trial import Trial, common
from dtrain.records import dataclass
from dtrain.runtime.layout import SIZES, BackendName, Layout

USUAL_BATCH = 4e6
"""Default tokens in one step, typical of models with tens of billions of parameters."""
USUAL_SHARES = (1024, 65_536)
"""Least and most tokens of a step for each GPU. Llama 3 405B used 16M on 16,384 GPUs (arXiv
2407.21783). GPT-2 on 8 GPUs uses 0.5M (nanoGPT): more only makes steps longer."""
FINE_TUNING = 128
"""Default sequences in a step of fine-tuning, as in Tulu 3 (arXiv 2411.15124)."""

KEPT = ("reduce", "compile", "offload_activations")
"""Fields of a layout that a plan takes from the cluster file: no search chooses them."""


@dataclass(frozen=True, slots=True)
class RunError:
    """The measured time of a run's step, and estimates of it, in seconds."""

    run: str
    measured_s: float
    before_s: float
    after_s: float
    unseen_s: float | None = None
    """With what the other runs teach; None if there are none."""


@dataclass(frozen=True)
class Question:
    """A model, a cluster, and the fixed fields of the layout."""

    shape: Shape
    cluster: GpuCluster
    efficiency: Efficiency
    global_batch: int
    """Sequences in one optimizer step."""
    precision: Precision = "bf16"
    narrow_states: bool = False
    """Whether all states have 16 bits, as in `Assumptions`."""
    framework: Literal["torch", "tensorflow"] = "torch"
    backend: BackendName = "runtime"
    backend_required: bool = True
    """Whether the planner must not choose another backend if this one has no layout."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Layout` that must have this value."""
    kept: Mapping[str, Any] = field(default_factory=dict)
    """Values of `KEPT` fields, for the backend `runtime`."""
    tokens: int | None = None
    """Tokens of the whole training."""
    price_per_gpu_hour: float | None = None
    reliability: Reliability = field(default_factory=Reliability)
    """What the training with failures assumes."""
    cluster_source: str = ""
    """Source of the cluster, for users; ``batch_source`` is the source of the batch."""
    batch_source: str = ""
    notes: tuple[str, ...] = ()
    """Assumed and overridden values, for users."""
    hardware: Hardware = field(default_factory=hardware)
    """The GPUs that may be suggested instead."""
    calibration: tuple[RunError, ...] = ()
    """The errors for the runs from which the speed of the machine is learned."""
    probe: Probe | None = None
    """The measurements of the machines, if they were measured for this question."""

    def answer(self) -> Answer:
        """Return the search's result.

        Raises:
            UsageError: no layout divides evenly with the constraints; names the field.
        """
        constraints.check(self.shape, self.cluster, self.global_batch, self.fixed, self.backend)
        plan = self.search()
        if not plan.considered:
            return self._answer_of_another_backend()
        return self._answered(plan)

    def _answered(self, plan: Plan, *notes: str) -> Answer:
        backend = BACKENDS[self.backend]
        if self.narrow_states:
            notes += (f"states of 16 bits need `{backend.narrow_states}` in {backend.title}",)
        return Answer(replace(self, notes=(*self.notes, *notes)), plan)

    def _answer_of_another_backend(self) -> Answer:
        """Return the answer of the first backend that has layouts.

        Raises UsageError if there is none, or if this question requires its own backend.
        """
        others = (
            (name, found)
            for name in BACKENDS
            if name != self.backend and (found := replace(self, backend=name).search()).considered
        )
        first = next(others, None)
        if first is None:
            raise constraints.none_left(self.shape, self.cluster, self.global_batch, self.fixed)
        name, found = first
        reason = self._reason_against(found)
        if not self.backend_required:
            note = (
                f"this plan is for {BACKENDS[name].title} (`backend={name!r}`), because "
                f"the backend {self.backend} does not support {reason}"
            )
            return replace(self, backend=name)._answered(found, note)
        raise UsageError(
            f"the backend {self.backend} does not support {reason}",
            hint=f"use `backend` {' or '.join([name, *(other for other, _ in others)])}"
            + (", or leave a constraint out" if self.fixed else ""),
        )

    def _reason_against(self, found: Plan) -> str:
        """Why this question's backend has no layout, by those of another backend. The layout with
        the fewest reasons has only those that the user asked for."""
        fewest: list[str] = []
        for one in found.layouts:
            layout = replace(one.layout, backend=self.backend)
            reasons = [*self.refusals(layout)]
            if reasons and (not fewest or len(reasons) < len(fewest)):
                fewest = reasons
            if len(fewest) == 1:
                break
        return fewest[0]

    @property
    def pinned(self) -> bool:
        """Whether all parallel sizes are fixed, so that the question is about one layout."""
        if not any(size in self.fixed for size in SIZES):
            return False
        known, _ = constraints.completed(self.cluster, self.fixed)
        return all(size in known for size in SIZES)

    def search(self, **fixed: Any) -> Plan:
        """Return the layouts that also have ``fixed``; there may be none. Raises nothing.

        The search does not add offload to a layout whose sizes are all fixed.
        """
        return search(self._candidates(fixed))

    def fastest(self, **fixed: Any) -> Candidate | None:
        """Return the best layout of `search`, in a fraction of its time."""
        return fastest(self._candidates(fixed))

    def _candidates(self, fixed: Mapping[str, Any]) -> Iterator[Iterator[Candidate]]:
        return candidates(
            self.shape,
            self.cluster,
            self.efficiency,
            global_batch=self.global_batch,
            precision=self.precision,
            narrow_states=self.narrow_states,
            fixed={**({"offload": False} if self.pinned else {}), **self.fixed, **fixed},
            start=Layout(backend=self.backend, **(self.kept if self.backend == "runtime" else {})),
        )

    def refusals(self, layout: Layout) -> Iterator[str]:
        """Yield the reasons why the layout's backend cannot train the model this way."""
        return refusals(self.shape, layout, self.precision, narrow_states=self.narrow_states)

    def candidate(self, layout: Layout) -> Candidate:
        assumed = Assumptions.usual(
            self.precision, self.cluster.gpu, layout.backend, narrow_states=self.narrow_states
        )
        return Candidate(self.shape, layout, self.cluster, self.efficiency, assumed)


@dataclass(frozen=True)
class Answer:
    question: Question
    plan: Plan
    trials: tuple[Trial, ...] = ()
    """Layouts of which small steps were trained."""

    @property
    def fits(self) -> bool:
        """Whether a layout fits that no trial rules out."""
        if not self.trials:
            return self.plan.best is not None
        return any(not self.ruled_out(one) for one in self.plan.ranked())

    @cached_property
    def best(self) -> Candidate:
        """The fastest layout that fits; if none fits, the one that needs the least memory.

        With trials, it is the fastest of those that trained; if they rule out all, the fastest by
        the estimates. The one with the least memory keeps the optimizer on the GPU, unless offload
        is fixed.
        """
        tried = [one.corrected for one in self.trials if one.ok and one.fits]
        if tried:
            return min(tried, key=lambda one: one.time.total)
        left = (one for one in self.plan.ranked() if not self.ruled_out(one))
        found = next(left, None) if self.trials else self.plan.best
        if found := found or self.plan.best:
            return self.corrected(found)
        examples = [group.example for group in self.plan.rejected]
        if "offload" not in self.question.fixed:
            examples = [
                self.question.candidate(replace(one.layout, offload=False)) for one in examples
            ]
        return min(examples, key=lambda one: one.memory.total)

    def shortlist(self, count: int) -> tuple[Candidate, ...]:
        """Return the best layouts that differ in more than micro-batches; ``best`` is first."""
        if not self.fits:
            return (self.best,) if self.question.fixed else ()
        if not self.trials:
            return distinct(self.plan.ranked(), count)
        every = distinct(self.plan.ranked(), count + len(self.trials))
        left = [self.corrected(one) for one in every if not self.ruled_out(one)]
        left.sort(key=lambda one: (one.layout != self.best.layout, one.time.total))
        return tuple(left[:count])

    def corrected(self, candidate: Candidate) -> Candidate:
        """A layout with the time that follows from the trials: its own, or what they have in
        common."""
        for trial in self.trials:
            if trial.ok and trial.planned.layout == candidate.layout:
                return trial.corrected
        return replace(candidate, slowdown=common(self.trials)) if self.trials else candidate

    def ruled_out(self, candidate: Candidate) -> bool:
        """Whether a trial shows that a layout does not fit."""
        return any(one.planned.layout == candidate.layout and not one.fits for one in self.trials)

    def training(self, candidate: Candidate) -> TrainingCost | None:
        """Return the training on all tokens; None if the number of tokens is unknown."""
        tokens = self.question.tokens
        if tokens is None:
            return None
        shape, cluster = self.question.shape, self.question.cluster
        gpus = cluster.gpus
        seconds = tokens / (candidate.speed.tokens_per_s_per_gpu * gpus)
        per_step = self.question.global_batch * shape.seq_len
        failures = cost(
            self.question.reliability,
            parameters=shape.trained_parameters,
            backend=candidate.layout.backend,
            gpus=gpus,
            hosts=cluster.hosts,
            step=candidate.time.total,
            days=seconds / 86400,
        )
        price = self.question.price_per_gpu_hour
        return TrainingCost(
            tokens,
            -(-tokens // per_step),
            seconds / 86400,
            seconds / 3600 * gpus,
            failures,
            None if price is None else failures.gpu_hours * price,
            failures.gpu_hours * cluster.gpu.watts / 1e6 if cluster.gpu.watts else None,
        )


@dataclass(frozen=True, slots=True)
class TrainingCost:
    """The cost of training on a number of tokens; ``days`` and ``gpu_hours`` without failures."""

    tokens: int
    steps: int
    days: float
    gpu_hours: float
    with_failures: FailureCost
    price: float | None = None
    """Of all GPU-hours with failures; None without a price of one."""
    energy_mwh: float | None = None
    """Of the GPUs alone, at their rated power; None if that is unknown."""


def distinct(layouts: Iterable[Candidate], count: int) -> tuple[Candidate, ...]:
    """Return the first layout of each kind; kinds differ in parallel sizes, sharding or
    recompute."""
    kinds: dict[tuple[object, ...], Candidate] = {}
    for candidate in layouts:
        layout = candidate.layout
        kind = (
            layout.tensor, layout.pipeline, layout.context, layout.expert, layout.sharding,
            layout.recompute,
        )  # fmt: skip
        if kind not in kinds:
            kinds[kind] = candidate
            if len(kinds) == count:
                break
    return tuple(kinds.values())


def usual_batch(seq_len: int, gpus: int) -> int:
    """Return sequences for about 4 million tokens, within `USUAL_SHARES` of each GPU.

    The number is a power of two times the odd part of the number of GPUs, so that data ranks get
    equal shares.
    """
    least, most = (share * gpus for share in USUAL_SHARES)
    tokens = min(max(USUAL_BATCH, least), most)
    odd = gpus
    while odd % 2 == 0:
        odd //= 2
    batch = odd
    while batch * seq_len * 2**0.5 < tokens:
        batch *= 2
    return batch


def remarks(cluster: GpuCluster, batch: int, seq_len: int) -> Iterator[str]:
    """Yield notes on a question that has an answer, but one that may mislead."""
    if note := without_backend(cluster.gpu):
        yield note
    each, least = batch * seq_len / cluster.gpus, USUAL_SHARES[0]
    if each < least and cluster.gpus > 1:
        yield (
            f"a step has only {each:,.0f} tokens for each of {cluster.gpus:,} GPUs, which mostly "
            f"wait for each other: fewer GPUs, or {-(-least * cluster.gpus // seq_len):,} "
            "sequences or more, use them better"
        )


def fine_tuning_batch(batch: int, gpus: int) -> int:
    """Return ``batch`` halved to about `FINE_TUNING` sequences, at least one for each GPU."""
    while batch > FINE_TUNING and batch % 2 == 0 and batch // 2 >= gpus:
        batch //= 2
    return batch
