"""The result of `dtrain plan` as one self-contained HTML page."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from dtrain.parallelism.answer import alternatives, explain, units
from dtrain.parallelism.answer.remedies import remedies
from dtrain.parallelism.cost.candidate import Candidate
from dtrain.parallelism.question import Answer
from dtrain.records import dataclass
from dtrain_cli.options import as_options
from dtrain_cli.views import trials
from dtrain_cli.views.html import percent, rendered
from dtrain_cli.views.question import described, training_time

_FAR = 4
"""Multiple of the limit; a chart leaves out larger layouts, which would squeeze all others."""
_NEGLIGIBLE = 0.0005
"""The legend leaves out parts below this share of the longest bar."""


def page(answer: Answer, *, count: int, notes: Sequence[str] = ()) -> str:
    """Return the document. ``count`` layouts are compared."""
    question, best = answer.question, answer.best
    model = question.shape.name or units.large(question.shape.parameters)
    shown = answer.shortlist(count)
    return rendered(
        "layouts.html",
        ("layouts.css",),
        title=f"{model} on {question.cluster.gpus:,} × {question.cluster.gpu.name}",
        question=described(question, notes),
        fits=answer.fits,
        fixed=bool(question.fixed),
        considered=f"{answer.plan.considered:,}",
        headline=explain.headline(best),
        figures=explain.figures(best),
        fullness=" ".join(filter(None, (explain.fullness(best), alternatives.reserve(answer)))),
        training=training_time(answer),
        unit=question.cluster.gpu.unit,
        memory=_memory_chart(shown or (best,), best.limit),
        time=_time_chart(shown or (best,)),
        compared=_compared(shown),
        order=explain.order(shown),
        trials={
            "head": trials.TITLES,
            "rows": trials.rows(answer),
            "texts": [*trials.sentences(answer)],
            "caption": f"{trials.EXPLANATION[0].upper()}{trials.EXPLANATION[1:]}.",
        },
        remedies=[*map(as_options, remedies(answer))],
        others=[
            *alternatives.reasons(answer),
            *(f"{rival.name}: {rival.verdict}" for rival in alternatives.rivals(answer)),
        ],
        rejected=_rejected(answer),
    )


# Charts.


@dataclass(frozen=True, slots=True)
class _Measure:
    """The quantity that a chart's bars show."""

    parts: Mapping[str, str]
    """Cost field to its title, in the order of the colors."""
    format_value: Callable[[float], str]
    unit: str
    per_unit: float = 1.0


@dataclass(frozen=True, slots=True)
class _Bar:
    label: str
    values: Mapping[str, float]
    """Value by cost field."""
    aside: str = ""
    """Text after the total, if the total is over the limit."""

    @property
    def total(self) -> float:
        return sum(self.values.values())


def _memory_chart(shown: Sequence[Candidate], limit: float, name: str = "memory") -> dict[str, Any]:
    measure = _Measure(explain.MEMORY_PARTS, units.gib, "GiB")
    # No layout in the chart of rejected layouts fits, and its title already has this fact.
    aside = ", does not fit" if name == "memory" else ""
    bars = [
        _Bar(_name(one), _values(one.memory, measure), "" if one.fits else aside) for one in shown
    ]
    return _chart(name, bars, measure, limit)


def _time_chart(shown: Sequence[Candidate]) -> dict[str, Any]:
    longest = max(one.time.total for one in shown)
    unit, per_unit = ("s", 1.0) if longest >= 1 else ("ms", 1e3)
    measure = _Measure(explain.TIME_PARTS, units.seconds, unit, per_unit)
    return _chart("time", [_Bar(_name(one), _values(one.time, measure)) for one in shown], measure)


def _values(costs: object, measure: _Measure) -> dict[str, float]:
    return {name: float(getattr(costs, name)) for name in measure.parts}


def _name(candidate: Candidate) -> str:
    layout = candidate.layout
    pieces = f" in {layout.virtual_pipeline} pieces" if layout.virtual_pipeline > 1 else ""
    return (
        f"{explain.brief(candidate)}{pieces}, batch {layout.micro_batch}×{layout.grad_accumulation}"
    )


def _chart(
    name: str, bars: Sequence[_Bar], measure: _Measure, limit: float | None = None
) -> dict[str, Any]:
    """Return the template's values: positions and lengths are shares of the width, as text."""
    longest = max([bar.total for bar in bars] + ([limit] if limit else []))
    scale = longest * 1.02
    legend = {
        part: title
        for part, title in measure.parts.items()
        if any(bar.values[part] > _NEGLIGIBLE * longest for bar in bars)
    }
    colors = {part: f"c{number}" for number, part in enumerate(measure.parts)}
    rows = [
        [title, *(_short(bar.values[part] * measure.per_unit) for bar in bars)]
        for part, title in legend.items()
    ]
    return {
        "name": name,
        "scale": f"{scale:.9g}",
        "legend": [{"color": colors[part], "title": title} for part, title in legend.items()],
        "over": limit is not None and longest > limit,
        "limit": limit
        and {
            "x": percent(limit, scale),
            "anchor": "end" if limit > scale / 2 else "start",
            "text": measure.format_value(limit),
        },
        "bars": [_bar(bar, measure, colors, scale, limit) for bar in bars],
        "ticks": [*_ticks(longest, scale, measure)],
        "unit": measure.unit,
        "head": ["", *range(1, len(bars) + 1)],
        "rows": [*rows, ["total", *(_short(bar.total * measure.per_unit) for bar in bars)]],
    }


def _bar(
    bar: _Bar, measure: _Measure, colors: Mapping[str, str], scale: float, limit: float | None
) -> dict[str, Any]:
    breakdown = ", ".join(
        f"{measure.parts[part]} {measure.format_value(value)}"
        for part, value in bar.values.items()
        if value > _NEGLIGIBLE * scale
    )
    parts, before = [], 0.0
    for part, value in bar.values.items():
        if value <= 0:
            continue
        share = f"{value / bar.total * 100:.0f} %"
        parts.append(
            {
                "x": percent(before, scale),
                "width": percent(value, scale),
                "color": colors[part],
                "value": f"{value:.9g}",
                "title": f"{measure.parts[part]}: {measure.format_value(value)}, {share}",
            }
        )
        before += value
    return {
        "label": bar.label,
        "total": measure.format_value(bar.total),
        "aside": bar.aside,
        "description": f"{bar.label}: {measure.format_value(bar.total)}: {breakdown}",
        "parts": parts,
        "excess": percent(before - limit, scale) if limit is not None and before > limit else "",
    }


def _ticks(longest: float, scale: float, measure: _Measure) -> Iterator[dict[str, str]]:
    step = _round_step(longest * measure.per_unit / 6) / measure.per_unit
    for number in range(int(scale / step) + 1):
        at = number * step
        anchor, unit = "middle" if at < scale * 0.95 else "end", ""
        if number == 0:
            anchor, unit = "start", f" {measure.unit}"
        text = f"{at * measure.per_unit:,.6g}{unit}"
        yield {"x": percent(at, scale), "anchor": anchor, "text": text}


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}" if value < 10 else f"{value:.1f}"


def _round_step(least: float) -> float:
    """1, 2 or 5 times a power of ten, not below ``least``."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * 0.999)


# Tables.


def _compared(candidates: Sequence[Candidate]) -> dict[str, Any] | None:
    if not candidates:
        return None
    speeds, gpu = [one.speed for one in candidates], candidates[0].cluster.gpu
    columns = {
        "": [str(rank + 1) for rank in range(len(candidates))],
        **explain.columns(candidates),
        f"tokens/s per {gpu.unit}": [units.amount(one.tokens_per_s_per_gpu) for one in speeds],
        f"TFLOP/s per {gpu.unit}": [units.tflops(one.model_tflops_per_gpu) for one in speeds],
    }
    if not gpu.is_cpu:
        columns |= {
            "MFU": [units.percent(one.mfu) for one in speeds],
            "causal MFU": [units.percent(one.mfu_causal) for one in speeds],
            "HFU": [units.percent(one.hfu) for one in speeds],
            "causal HFU": [units.percent(one.hfu_causal) for one in speeds],
        }
    return {"head": [*columns], "rows": [*zip(*columns.values(), strict=True)]}


def _rejected(answer: Answer) -> dict[str, Any] | None:
    """Layouts that do not fit: the smallest of each kind."""
    groups = answer.plan.rejected
    if not groups:
        return None
    limit = groups[0].example.limit
    drawn = [group.example for group in groups if group.example.memory.total <= _FAR * limit]
    return {
        "count": f"{sum(group.count for group in groups):,}",
        "limit": units.gib(limit),
        "rows": [
            (
                group.reason,
                explain.brief(group.example),
                f"{group.count:,}",
                f"{group.example.memory.total:,.1f}",
            )
            for group in groups
        ],
        "chart": _memory_chart(drawn, limit, "rejected") if drawn else None,
    }
