"""What a few steps of a small model tell about a layout's whole step. Pure.

`dtrain plan --trials` trains the planned layout with fewer layers and fewer micro-batches. The
kernels, messages and ranks are those of the whole model, and so are the stages of a pipeline; only
the counts are smaller. For a fixed layout, the time of a step is close to

    a + b·layers + c·micro-batches + d·layers·micro-batches

because each layer of each micro-batch takes the same time, a pipeline's bubble is as long as a few
more micro-batches, and gradients and optimizer take as long for each layer. So two depths and two
numbers of micro-batches determine all four terms, and these give the time of the whole step.

The planner estimates the same small steps. Both series are extended to the whole step in the same
way, and the estimate for the layout is multiplied by their ratio. What the formula does not follow,
such as stages of different depths, is then off by the same factor in both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import combinations

from dtrain.parallelism.cluster.hardware import GIB
from dtrain.parallelism.cost.candidate import Candidate
from dtrain.parallelism.model.shape import Shape
from dtrain.records import dataclass
from dtrain.runtime.layout import Layout

MOST_TRIALS = 16


@dataclass(frozen=True, slots=True)
class Case:
    """The size of a small model and its step."""

    layers: int
    micro_batches: int
    """Of one data rank in a step."""


@dataclass(frozen=True, slots=True)
class MeasuredCase:
    """A case that was trained."""

    case: Case
    seconds: float
    """Of a step: the median."""
    fastest: float
    """Seconds of the fastest step, which says how steady the machine is."""
    allocated: float | None = None
    """Most bytes of PyTorch's allocator on one GPU; None on CPUs."""
    resident: float | None = None
    """Most bytes of one process, with its libraries; None on GPUs."""


def cases(shape: Shape, layout: Layout) -> tuple[Case, ...]:
    """Return what to train, smallest first: up to two depths with up to two numbers of
    micro-batches.

    Each piece of the pipeline has 2 and 4 layers, and there are as many micro-batches as stages
    and twice as many; fewer if the whole model has fewer. Without a pipeline there are 2 and 4
    micro-batches, because a step of one has no gradients to add up.
    """
    pieces = layout.pipeline * layout.virtual_pipeline
    depths = _two(shape.layers, 2 * pieces, pieces)
    counts = _two(layout.grad_accumulation, max(2, layout.pipeline), layout.round_size)
    return tuple(Case(layers, count) for count in counts for layers in depths)


def _two(whole: int, small: int, unit: int) -> tuple[int, ...]:
    """``small`` and twice that. If ``whole`` is less: itself, and about half of it."""
    if whole >= 2 * small:
        return small, 2 * small
    half = whole // 2 // unit * unit
    return (half, whole) if half else (whole,)


def unsupported(shape: Shape, layout: Layout) -> str:
    """Return why a trial cannot train this; '' if it can."""
    if layout.backend != "runtime":
        return f"they train with dtrain.runtime, and this plan is for `backend={layout.backend!r}`"
    known = {
        "LoRA": shape.lora is not None,
        "latent attention (MLA)": bool(shape.kv_rank or shape.value_head_size),
        "shared experts": bool(shape.shared_experts),
        "layers of several kinds": bool(
            (shape.experts and shape.dense_layers) or shape.pattern or shape.parts
        ),
        "parallel attention and MLP": shape.parallel,
        "models that are not causal": not shape.causal,
    }
    missing = [name for name, present in known.items() if present]
    return f"they do not train {missing[0]}" if missing else ""


@dataclass(frozen=True)
class Trial:
    """A layout of which small steps were trained, or an attempt at that."""

    planned: Candidate
    """The estimate without the trial."""
    measured: tuple[MeasuredCase, ...] = ()
    failure: str = ""
    """Why it did not train all cases; '' if it did."""
    hint: str = ""
    out_of_memory: bool = False
    run: str = ""
    """Name of the run that trained it."""

    @property
    def ok(self) -> bool:
        return not self.failure

    def small(self, case: Case) -> Candidate:
        """The planner's candidate for a case."""
        planned = self.planned
        return replace(
            planned,
            shape=replace(planned.shape, layers=case.layers),
            layout=replace(planned.layout, grad_accumulation=case.micro_batches),
        )

    @cached_property
    def largest(self) -> MeasuredCase:
        """The last case, which is the largest. There must be one."""
        return self.measured[-1]

    @property
    def expected(self) -> float:
        """The planner's estimate for the step of `largest`, in seconds."""
        return self.small(self.largest.case).time.total

    @cached_property
    def slowdown(self) -> float:
        """The factor of the planned step's time."""
        whole = Case(self.planned.shape.layers, self.planned.layout.grad_accumulation)
        seconds = [(one.case, one.seconds) for one in self.measured]
        estimates = [(case, self.small(case).time.total) for case, _ in seconds]
        return extended(seconds, whole) / extended(estimates, whole)

    @cached_property
    def corrected(self) -> Candidate:
        """The layout with the time that follows from the trial; as planned if it failed."""
        return replace(self.planned, slowdown=self.slowdown) if self.ok else self.planned

    @cached_property
    def memory(self) -> float | None:
        """GiB of the fullest GPU at its peak as the driver counts it: the estimate, corrected by
        what the allocator had in the trials. None without such a measurement."""
        if not self.ok or any(one.allocated is None for one in self.measured):
            return None
        layers = self.planned.shape.layers
        rows = [one for one in self.measured if one.case.micro_batches == self._held]
        used = [((one.case.layers, (one.allocated or 0.0) / GIB)) for one in rows]
        planned = [
            (depth, self.small(one.case).memory.allocated)
            for one, (depth, _) in zip(rows, used, strict=True)
        ]
        more = _line(used, layers) - _line(planned, layers)
        return self.planned.memory.total + more

    @property
    def _held(self) -> int:
        """The micro-batches of the cases whose memory counts: the most that were trained."""
        return max(one.case.micro_batches for one in self.measured)

    @property
    def fits(self) -> bool:
        """Whether the layout fits, as far as the trial tells."""
        if self.out_of_memory:
            return False
        return self.memory is None or self.memory <= self.planned.limit


def common(trials: Sequence[Trial]) -> float:
    """The factor for layouts that were not trained: the geometric mean of those that were."""
    logarithms = [math.log(one.slowdown) for one in trials if one.ok]
    return math.exp(math.fsum(logarithms) / len(logarithms)) if logarithms else 1.0


def _line(points: Sequence[tuple[int, float]], at: int) -> float:
    """The value at ``at`` of the line through the first and the last point."""
    (first, low), (last, high) = points[0], points[-1]
    return high if first == last else high + (high - low) / (last - first) * (at - last)


def extended(times: Sequence[tuple[Case, float]], whole: Case) -> float:
    """The time of ``whole``, from the times of smaller cases.

    The terms of the module's formula are at least 0: of all sets of terms with such a solution, the
    one with the least relative error counts. Noise would otherwise be extended into the whole step
    as a negative term.
    """
    exact = dict(times).get(whole)
    if exact is not None:
        return exact
    best: tuple[float, float] | None = None
    rows = [[term / seconds for term in _terms(case)] for case, seconds in times]
    for count in range(1, 5):
        for chosen in combinations(range(4), count):
            factors = _least_squares([[row[term] for term in chosen] for row in rows])
            if factors is None or min(factors) < 0:
                continue
            error = math.fsum(
                (math.fsum(f * row[term] for f, term in zip(factors, chosen, strict=True)) - 1) ** 2
                for row in rows
            )
            target = _terms(whole)
            value = math.fsum(f * target[term] for f, term in zip(factors, chosen, strict=True))
            # Rounding errors must not decide between two exact solutions: fewer terms first.
            if best is None or error < best[0] - 1e-12:
                best = error, value
    assert best is not None  # noqa: S101 - one term alone always has a solution
    return best[1]


def _terms(case: Case) -> tuple[float, float, float, float]:
    layers, count = float(case.layers), float(case.micro_batches)
    # First the term that a step mostly consists of: it is the one that a single case gives.
    return layers * count, layers, count, 1.0


def _least_squares(rows: Sequence[Sequence[float]]) -> list[float] | None:
    """The factors with which each row's sum is closest to 1; None if they are not determined."""
    size = len(rows[0])
    if len(rows) < size:
        return None
    left = [[math.fsum(row[a] * row[b] for row in rows) for b in range(size)] for a in range(size)]
    right = [math.fsum(row[a] for row in rows) for a in range(size)]
    scale = [math.sqrt(left[a][a]) for a in range(size)]
    table = [
        [*(left[a][b] / scale[a] / scale[b] for b in range(size)), right[a] / scale[a]]
        for a in range(size)
    ]
    for column in range(size):
        pivot = max(range(column, size), key=lambda row: abs(table[row][column]))
        if abs(table[pivot][column]) < 1e-10:
            return None
        table[column], table[pivot] = table[pivot], table[column]
        for row in range(size):
            if row != column:
                share = table[row][column] / table[column][column]
                table[row] = [x - share * y for x, y in zip(table[row], table[column], strict=True)]
    return [table[a][size] / table[a][a] / scale[a] for a in range(size)]
