"""The planner's question, and the answer that all views of a plan use."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field, replace
from functools import cached_property, lru_cache
from typing import Any, Literal

from dtrain.diagnostics import UsageError
from dtrain.parallelism import constraints
from dtrain.parallelism.assumptions import Assumptions
from dtrain.parallelism.backends import BACKENDS, refusals, without_backend
from dtrain.parallelism.cluster.efficiency import Efficiency
from dtrain.parallelism.cluster.hardware import PRECISIONS, GpuCluster, Precision
from dtrain.parallelism.cluster.hardware_table import Hardware, hardware
from dtrain.parallelism.cluster.probe import Probe
from dtrain.parallelism.cost.candidate import Candidate
from dtrain.parallelism.model.shape import Shape
from dtrain.parallelism.reliability import NODE, FailureCost, Reliability, cost
from dtrain.parallelism.search import Plan, candidates, compared_time, search
from dtrain.parallelism.trial import Trial, common
from dtrain.records import changed, dataclass
from dtrain.runtime.layout import SIZES, BackendName, Layout
from dtrain.wording import counted, either

MUCH_SLOWER = 1.5
"""Times that a step takes with the backend ``runtime`` from which a plan is for another backend, if
the user names none: then a better layout is worth a script for other software. Steps with offload
count longer, as in the ranking."""

KEPT = ("reduce", "compile", "offload_activations")
"""Fields of a layout that a plan takes from the cluster file: no search chooses them."""


# Caches of costs find the same object faster than an equal one.
_usual = lru_cache(maxsize=64)(Assumptions.usual)


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
    hides_exchange: bool = False
    """As in `Assumptions`."""
    one_graph: bool = False
    """As in `Assumptions`."""
    framework: Literal["torch", "tensorflow"] = "torch"
    backend: BackendName = "runtime"
    backend_from: Literal["", "backend", "trials", "strategy"] = "backend"
    """What chose the backend. If nothing did, the planner may choose another; from the strategy of
    the cluster file, only if no layout of this one fits."""
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
        if plan.considered and (self.backend_required or self.kept):
            return Answer(self, plan)
        if not (plan.considered or self.others):
            raise self._nothing_left()
        reason = self._reason_against(plan)
        if not reason:
            return Answer(self, plan)
        names = [other.backend for other in self.others]
        if self.backend_required:
            hint = f"use `backend` {' or '.join(names)}"
            if self.backend_from == "trials":
                hint = f"leave `trials` out, which only the backend {self.backend} has"
            raise UsageError(
                f"the backend {self.backend} {reason}",
                hint=hint + (", or leave a constraint out" if self.fixed else ""),
            )
        note = (
            f"this plan is for {BACKENDS[names[0]].title} (`backend={names[0]!r}`), because the "
            f"backend {self.backend} {reason}"
        )
        # Devices on which no backend runs have a note already.
        notes = self.notes if without_backend(self.cluster.gpu) else (*self.notes, note)
        return Answer(replace(self, backend=names[0], notes=notes), self.others[0])

    @property
    def backend_required(self) -> bool:
        """Whether the planner must not choose another backend."""
        return self.backend_from in ("backend", "trials")

    @cached_property
    def others(self) -> tuple[Plan, ...]:
        """The plans of other backends that have layouts, fastest first."""
        plans = (replace(self, backend=name).search() for name in BACKENDS if name != self.backend)
        return tuple(
            sorted(
                (plan for plan in plans if plan.considered),
                key=lambda plan: compared_time(plan.best) if plan.best else math.inf,
            )
        )

    def _reason_against(self, plan: Plan) -> str:
        """Return why the plan should be the fastest of the other backends'; '' if it should not."""
        if not plan.considered:
            return f"does not support {self._lacking()}"
        other = self.others[0].best if self.others else None
        if other is None:
            return ""
        if plan.best is None:
            return "has no layout that fits"
        if self.backend_from == "strategy":
            return ""
        if compared_time(plan.best) <= MUCH_SLOWER * compared_time(other):
            return ""
        times = plan.best.time.total / other.time.total
        if plan.best.layout.offload and times <= MUCH_SLOWER:
            return "needs the optimizer in the hosts' memory (offload)"
        return f"takes {times:.1f} times as long"

    def _nothing_left(self) -> UsageError:
        """Return the error for constraints that no backend can meet: what the one with the fewest
        reasons lacks for them, or that nothing divides evenly."""
        known, _ = constraints.completed(self.cluster, self.fixed)
        known.setdefault("data", self.cluster.gpus // math.prod(known.get(s, 1) for s in SIZES))
        # The runtime is last: the others have most features that it lacks.
        on_cpus = self.cluster.gpu.is_cpu
        layouts = (
            Layout(**{**known, "backend": name})
            for name, backend in reversed(BACKENDS.items())
            if backend.runs_on_cpus or not on_cpus
        )
        lacking = [[*self.refusals(layout)] for layout in layouts]
        if reasons := min(lacking, key=len):
            text, hint = reasons[0], "choose another model or precision"
            if text == self.precision:
                able = (others for others in lacking if text not in others)
                if rest := min(able, key=len, default=None):
                    text += f" together with {rest[0]}"
                hint = self._other_precision()
            if self.fixed:
                hint = "leave a constraint out"
            if on_cpus:
                text = f"{text} on CPUs"
                hint = f"{hint}, or plan for GPUs" if self.fixed else "plan for GPUs"
            return UsageError(f"no backend supports {text}", hint=hint)
        return constraints.none_left(self.shape, self.cluster, self.global_batch, self.fixed)

    def _other_precision(self) -> str:
        """Return the hint for a precision that no backend has for this model."""
        gpu = self.cluster.gpu
        usable = [
            one
            for one in PRECISIONS
            if one in gpu.flops
            and any(
                replace(self, precision=one, backend=name).search().considered for name in BACKENDS
            )
        ]
        choices = [f"`precision` {either(usable)}"] * bool(usable)
        choices += ["another model", *(["a GPU with bf16"] if "bf16" not in gpu.flops else [])]
        return f"use {either(choices)}"

    def _lacking(self) -> str:
        """Return what this question's backend lacks for all layouts of the fastest other one, else
        the size of the problem."""
        every = (one.layout for one in self.others[0].layouts)
        first, *rest = (changed(one, backend=self.backend) for one in every)
        for reason in self.refusals(first):
            # `in` stops at the reason: most layouts share the first one.
            if all(reason in self.refusals(one) for one in rest):
                return reason
        return f"a step of {counted(self.global_batch, 'sequence')} on {self.cluster.devices}"

    @property
    def pinned(self) -> bool:
        """Whether all parallel sizes are fixed, so that the question is about one layout. On one
        GPU, a size has no other value: then all must be given."""
        known = self.fixed
        if self.cluster.gpus > 1 and any(size in known for size in SIZES):
            known, _ = constraints.completed(self.cluster, self.fixed)
        return all(size in known for size in SIZES)

    def search(self, **fixed: Any) -> Plan:
        """Return the layouts that also have ``fixed``; there may be none. Raises nothing.

        The search does not add offload to a layout whose sizes are all fixed.
        """
        fixed = {**({"offload": False} if self.pinned else {}), **self.fixed, **fixed}
        return search(self._candidates(fixed), offload="offload" not in fixed)

    def fastest(self, **fixed: Any) -> Candidate | None:
        """Return the best layout of `search`."""
        return self.search(**fixed).best

    def planned(self) -> Candidate | None:
        """Return the layout that a plan would have, of the backend that it would choose; None if
        none fits. This question's backend may be the planner's choice: another question may have
        another."""
        asked = self if self.backend_required else replace(self, backend="runtime")
        try:
            answer = asked.answer()
        except UsageError:
            return None
        return answer.best if answer.fits else None

    def _candidates(self, fixed: Mapping[str, Any]) -> Iterator[Candidate]:
        """Yield all layouts that have ``fixed``, with offload only if that is fixed."""
        return candidates(
            self.shape,
            self.cluster,
            self.efficiency,
            self._assumed(self.backend),
            global_batch=self.global_batch,
            fixed=fixed,
            start=Layout(backend=self.backend, **(self.kept if self.backend == "runtime" else {})),
        )

    def refusals(self, layout: Layout) -> Iterator[str]:
        """Yield the reasons why the layout's backend cannot train the model this way."""
        return refusals(
            self.shape,
            layout,
            self.precision,
            narrow_states=self.narrow_states,
            hides_exchange=self.hides_exchange,
            one_graph=self.one_graph,
            on_cpus=self.cluster.gpu.is_cpu,
        )

    def candidate(self, layout: Layout) -> Candidate:
        assumed = self._assumed(layout.backend)
        return Candidate(self.shape, layout, self.cluster, self.efficiency, assumed)

    def _assumed(self, backend: BackendName) -> Assumptions:
        return _usual(
            self.precision,
            self.cluster.gpu,
            backend,
            narrow_states=self.narrow_states,
            hides_exchange=self.hides_exchange,
            one_graph=self.one_graph,
        )


@dataclass(frozen=True)
class Answer:
    question: Question
    plan: Plan
    trials: tuple[Trial, ...] = ()
    """Layouts of which small steps were trained."""

    @property
    def notes(self) -> tuple[str, ...]:
        """The question's notes, and what the script must turn on in the backend's software."""
        question = self.question
        if without_backend(question.cluster.gpu):
            return question.notes
        backend, notes = BACKENDS[question.backend], [*question.notes]
        if question.kept and question.backend == "runtime":
            notes.append(self._kept())
        if question.narrow_states:
            notes.append(f"states of 16 bits need `{backend.narrow_states}` in {backend.title}")
        if question.hides_exchange:
            notes.append(
                "exchanges between experts beside the computation need "
                f"`{backend.hides_exchange}` in {backend.title} (Megatron-Core 0.14; a pipeline of "
                "it must be interleaved), or other software such as DualPipe: the script turns it "
                "on, not dtrain"
            )
        if question.one_graph:
            notes.append(
                f"a CUDA graph of the whole step needs `{backend.one_graph}` in {backend.title} "
                "(Megatron-Core 0.18; experts also need a fixed capacity or `--moe-paged-stash`, "
                "whose buffers the memory does not count): the script turns it on, not dtrain"
            )
        return tuple(notes)

    def _kept(self) -> str:
        """Say which values of the cluster file's layout the plan has."""
        values = self.question.kept.items()
        text = either([f"{name}: {str(value).lower()}" for name, value in values], "and")
        text = f"the plan has {text} from job.layout"
        if self.best.layout.offload_activations and self.best.layout.tensor > 1:
            text += "; activations that tensor ranks split stay on the GPUs"
        return text

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
            nodes=cluster.hosts if cluster.gpu.is_cpu else gpus / NODE,
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
