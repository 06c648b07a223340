"""The layouts that `dtrain plan` found as one HTML page, which needs nothing but itself.

No script, no font, no request: charts are inline SVG whose lengths are shares of the page's
width, so that text keeps its size on every screen, and what color tells a table tells too.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

from dtrain.framing import clean
from dtrain.parallelism.answer import alternatives, explain
from dtrain.parallelism.cluster.hardware import Hardware
from dtrain.parallelism.cost.candidate import Candidate
from dtrain.parallelism.question import Answer
from dtrain_cli.views import names

_FAR = 4
"""Times the limit: layouts that need more would squeeze all others in a chart."""
_NEGLIGIBLE = 0.0005
"""Share of the longest bar below which a part is left out of the legend."""


def page(answer: Answer, table: Hardware, *, count: int, notes: Sequence[str] = ()) -> str:
    """The whole document. ``count`` layouts are compared; ``table`` is for what would fit."""
    style = Path(__file__).with_name("layouts.css").read_text("utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    question = answer.question
    gpus = f"{question.cluster.gpus:,} × {question.cluster.gpu.name}"
    model = clean(question.shape.name) or explain.large(question.shape.parameters)
    title = f"{model} on {gpus}"
    sections = [
        _result(answer),
        *_charts(answer, count),
        _compared(answer.shortlist(count)),
        _others(answer, table),
        _rejected(answer),
    ]
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; \
style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{escape(title)} - dtrain plan</title>
<style>{style}</style>
</head>
<body>
{_PATTERNS}
<main>
<header>
<p class="from">dtrain plan</p>
<h1>{escape(title)}</h1>
{_question(answer, notes)}
</header>
{"".join(section for section in sections if section)}</main>
<footer><p>GiB are 2<sup>30</sup> bytes. Times and memory are estimates; their formulas and \
sources are in dtrain's package <code>dtrain.parallelism</code>.</p></footer>
</body>
</html>
"""


_PATTERNS = (
    '<svg class="patterns" width="0" height="0" aria-hidden="true"><defs>'
    '<pattern id="over" width="6" height="6" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><path d="M0 0V6" class="hatch"/></pattern>'
    "</defs></svg>"
)


def _section(title: str, *content: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n{''.join(content)}</section>\n"


def _p(text: str, kind: str = "") -> str:
    return f"<p{f' class={kind}' if kind else ''}>{escape(clean(text))}</p>\n" if text else ""


def _list(texts: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(clean(text))}</li>\n" for text in texts)
    return f"<ul>\n{items}</ul>\n" if items else ""


# What was planned for, and what to do.


def _question(answer: Answer, notes: Sequence[str]) -> str:
    question = answer.question
    shape, cluster = question.shape, question.cluster
    model = (
        f"{explain.large(shape.parameters)} parameters: {names.count(shape.layers, 'layer')} of "
        f"hidden size {shape.hidden:,}, {names.count(shape.heads, 'head')} "
        f"({shape.kv_heads} for keys and values), MLP {shape.ffn_hidden:,}"
    )
    if shape.experts:
        model += (
            f", {shape.experts} experts of which a token uses {shape.experts_per_token} "
            f"({explain.large(shape.active_parameters)} parameters)"
        )
    model += f", vocabulary {shape.vocab:,}, sequences of {shape.seq_len:,} tokens"
    where = f"{cluster.gpus:,} × {cluster.gpu.name} of {explain.gib(cluster.gpu.memory)}"
    if cluster.hosts > 1:
        where += (
            f", {cluster.gpus_per_host} in each of {cluster.hosts} hosts, "
            f"{cluster.network * 8:g} Gb/s between hosts"
        )
    if question.cluster_source:
        where += f" ({question.cluster_source})"
    batch = (
        f"{names.count(question.global_batch, 'sequence')} = "
        f"{explain.large(question.global_batch * shape.seq_len)} tokens a step, "
        f"in {question.precision}"
    )
    if question.batch_source:
        batch += f" ({question.batch_source})"
    entries = [("Model", model), ("Cluster", where), ("Batch", batch)]
    entries += [("Note", note) for note in notes]
    rows = "".join(
        f"<div><dt>{name}</dt><dd>{escape(clean(text))}</dd></div>\n" for name, text in entries
    )
    return f"<dl>\n{rows}</dl>"


def _result(answer: Answer) -> str:
    best, question = answer.best, answer.question
    if not answer.fits:
        what = "No layout that was asked for fits" if question.fixed else "Nothing fits"
        return _section(
            what,
            _p(f"{answer.plan.considered:,} layouts were looked at. The nearest:"),
            _p(explain.headline(best), "lead"),
            _p(explain.fullness(best), "over"),
        )
    training = answer.training(best)
    return _section(
        "What to do",
        _p(explain.headline(best), "lead"),
        _p(explain.figures(best)),
        _p(explain.fullness(best)),
        _p(
            f"{explain.large(training.tokens)} tokens take {explain.amount(training.days)} days "
            f"on {question.cluster.gpus:,} GPUs: {training.steps:,} steps, "
            f"{training.gpu_hours:,.0f} GPU-hours, if nothing fails."
            if training
            else ""
        ),
    )


# Charts.


@dataclass(frozen=True, slots=True)
class _Measure:
    """What the bars of a chart measure."""

    parts: Mapping[str, str]
    """Field of the costs to what people call it; the order is that of the colors."""
    said: Callable[[float], str]
    unit: str
    per_unit: float = 1.0


@dataclass(frozen=True, slots=True)
class _Bar:
    label: str
    values: Mapping[str, float]
    """By field."""
    aside: str = ""
    """What stands behind the total, where that is too much."""

    @property
    def total(self) -> float:
        return sum(self.values.values())


def _charts(answer: Answer, count: int) -> Iterator[str]:
    shown = answer.shortlist(count) or (answer.best,)
    bars = [
        replace(
            _bar(one, one.memory, explain.MEMORY_PARTS),
            aside="" if one.fits else ", does not fit",
        )
        for one in shown
    ]
    limit = answer.best.limit
    memory = _chart("memory", bars, _memory_measure(), limit)
    bars = [_bar(one, one.time, explain.TIME_PARTS) for one in shown]
    longest = max(bar.total for bar in bars)
    unit, per_unit = ("s", 1.0) if longest >= 1 else ("ms", 1e3)
    measure = _Measure(explain.TIME_PARTS, explain.seconds, unit, per_unit)
    time = _chart("time", bars, measure, None)
    aside = "" if answer.fits else " if it fitted"
    yield (
        '<div class="charts">\n'
        + _section("Memory of the fullest GPU", memory)
        + _section(f"Time of a step{aside}", time)
        + "</div>\n"
    )


def _memory_measure() -> _Measure:
    return _Measure(explain.MEMORY_PARTS, explain.gib, "GiB")


def _bar(candidate: Candidate, costs: object, parts: Mapping[str, str]) -> _Bar:
    values = {name: float(getattr(costs, name)) for name in parts}
    return _Bar(_name(candidate), values)


def _name(candidate: Candidate) -> str:
    layout = candidate.layout
    pieces = f" in {layout.virtual_pipeline} pieces" if layout.virtual_pipeline > 1 else ""
    return (
        f"{explain.brief(candidate)}{pieces}, batch {layout.micro_batch}×{layout.grad_accumulation}"
    )


def _chart(name: str, bars: Sequence[_Bar], measure: _Measure, limit: float | None) -> str:
    """Stacked bars with a common axis, the legend before them and the numbers behind them."""
    longest = max([bar.total for bar in bars] + ([limit] if limit else []))
    step = _round_step(longest * measure.per_unit / 6) / measure.per_unit
    scale = longest * 1.02
    legend = {
        part: title
        for part, title in measure.parts.items()
        if any(bar.values[part] > _NEGLIGIBLE * longest for bar in bars)
    }
    colors = {part: f"c{number}" for number, part in enumerate(measure.parts)}
    keys = "".join(
        f'<li><svg class="key" width="12" height="12" aria-hidden="true">'
        f'<rect width="12" height="12" class="{colors[part]}"/></svg>{escape(title)}</li>'
        for part, title in legend.items()
    )
    if limit is not None and longest > limit:
        keys += (
            '<li><svg class="key" width="12" height="12" aria-hidden="true"><rect width="12" '
            'height="12" class="hatched" fill="url(#over)"/></svg>over the limit</li>'
        )
    rows = "".join(
        f'<li><p class="label"><span>{escape(bar.label)}</span> <b{over if bar.aside else ""}>'
        f"{escape(measure.said(bar.total) + bar.aside)}</b></p>"
        f"{_stack(bar, measure, colors, scale, limit)}</li>\n"
        for over in [' class="over"']
        for bar in bars
    )
    mark = "" if limit is None else _mark(limit, scale, measure)
    return (
        f'<figure class="chart" id="{name}" data-scale="{scale:.9g}">\n<ul class="legend">{keys}'
        f'</ul>\n{mark}<ol class="bars">\n{rows}</ol>\n{_axis(step, scale, measure)}'
        f"<details><summary>The numbers</summary>\n{_numbers(bars, measure, legend)}</details>\n"
        "</figure>\n"
    )


def _stack(
    bar: _Bar, measure: _Measure, colors: Mapping[str, str], scale: float, limit: float | None
) -> str:
    said = ", ".join(
        f"{measure.parts[part]} {measure.said(value)}"
        for part, value in bar.values.items()
        if value > _NEGLIGIBLE * scale
    )
    label = f"{bar.label}: {measure.said(bar.total)}, of which {said}"
    drawn, before = [], 0.0
    for part, value in bar.values.items():
        if value <= 0:
            continue
        share = f"{value / bar.total * 100:.0f} %"
        drawn.append(
            f'<rect x="{_at(before, scale)}" width="{_at(value, scale)}" y="0" height="20" '
            f'class="{colors[part]}" data-value="{value:.9g}"><title>'
            f"{escape(measure.parts[part])}: {escape(measure.said(value))}, {share}</title></rect>"
        )
        before += value
    if limit is not None:
        if before > limit:
            drawn.append(
                f'<rect x="{_at(limit, scale)}" width="{_at(before - limit, scale)}" y="0" '
                'height="20" class="hatched" fill="url(#over)"/>'
            )
        where = _at(limit, scale)
        drawn.append(f'<line class="limit" x1="{where}" x2="{where}" y1="0" y2="20"/>')
    return (
        f'<svg class="bar" width="100%" height="20" role="img" aria-label="{escape(label)}">'
        f"{''.join(drawn)}</svg>"
    )


def _mark(limit: float, scale: float, measure: _Measure) -> str:
    where = _at(limit, scale)
    anchor = "end" if limit > scale / 2 else "start"
    return (
        '<svg class="axis" width="100%" height="18" aria-hidden="true">'
        f'<text x="{where}" y="13" text-anchor="{anchor}">limit {escape(measure.said(limit))}'
        "</text></svg>\n"
    )


def _axis(step: float, scale: float, measure: _Measure) -> str:
    ticks = []
    for number in range(int(scale / step) + 1):
        where, value = _at(number * step, scale), number * step * measure.per_unit
        anchor = "start" if number == 0 else "middle" if number * step < scale * 0.95 else "end"
        unit = f" {measure.unit}" if number == 0 else ""
        ticks.append(
            f'<line x1="{where}" x2="{where}" y1="0" y2="5"/>'
            f'<text x="{where}" y="18" text-anchor="{anchor}">{value:,.6g}{unit}</text>'
        )
    return f'<svg class="axis" width="100%" height="24" aria-hidden="true">{"".join(ticks)}</svg>\n'


def _numbers(bars: Sequence[_Bar], measure: _Measure, legend: Mapping[str, str]) -> str:
    """The chart as a table, a column for each bar."""
    head = ["", *(str(number + 1) for number in range(len(bars)))]
    rows = [
        [title, *(_short(bar.values[part] * measure.per_unit) for bar in bars)]
        for part, title in legend.items()
    ]
    rows.append(["total", *(_short(bar.total * measure.per_unit) for bar in bars)])
    return _table(f"{measure.unit}, of each bar above by its number", head, rows, text=1)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}" if value < 10 else f"{value:.1f}"


def _at(value: float, scale: float) -> str:
    return f"{value / scale * 100:.5f}%"


def _round_step(least: float) -> float:
    """1, 2 or 5 times a power of ten, not below ``least``."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * 0.999)


# Tables.


def _table(
    caption: str,
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    text: int = 0,
    kind: str = "plain",
) -> str:
    """The first ``text`` columns are words, the first of which names its row; others are
    numbers."""

    def cell(column: int, value: str, element: str, scope: str = "") -> str:
        kind = "" if column < text else ' class="n"'
        return f"<{element}{scope}{kind}>{escape(clean(value))}</{element}>"

    columns = "".join(
        cell(column, title, "th", ' scope="col"') if title else "<td></td>"
        for column, title in enumerate(head)
    )
    body = "".join(
        "<tr>"
        + "".join(
            cell(column, value, "th", ' scope="row"') if column == 0 else cell(column, value, "td")
            for column, value in enumerate(row)
        )
        + "</tr>\n"
        for row in rows
    )
    return (
        f'<p class="caption">{escape(caption)}</p>\n'
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape(caption)}">\n'
        f'<table class="{kind}" aria-label="{escape(caption)}">\n'
        f"<thead><tr>{columns}</tr></thead>\n<tbody>\n{body}</tbody>\n</table>\n</div>\n"
    )


def _compared(candidates: Sequence[Candidate]) -> str:
    if not candidates:
        return ""
    columns: dict[str, list[str]] = {"": [str(rank + 1) for rank in range(len(candidates))]}
    layouts = [one.layout for one in candidates]

    def add(title: str, values: Iterable[str], *, always: bool = False) -> None:
        listed = [*values]
        if always or any(value not in ("1", "no", "none") for value in listed):
            columns[title] = listed

    add("tensor", (str(layout.tensor) for layout in layouts), always=True)
    add("pipeline", (str(layout.pipeline) for layout in layouts), always=True)
    add("pieces", (str(layout.virtual_pipeline) for layout in layouts))
    add("context", (str(layout.context) for layout in layouts))
    add("expert", (str(layout.expert) for layout in layouts))
    add("data", (str(layout.data) for layout in layouts), always=True)
    add("sharding", (explain.SHARDING[layout.sharding] for layout in layouts))
    add(
        "batch",
        (f"{layout.micro_batch}×{layout.grad_accumulation}" for layout in layouts),
        always=True,
    )
    add("recompute", (layout.recompute for layout in layouts))
    add("offload", ("yes" if layout.offload else "no" for layout in layouts))
    add("GiB", (f"{one.memory.total:,.1f}" for one in candidates), always=True)
    add("step", (explain.seconds(one.time.total) for one in candidates), always=True)
    speeds = [one.speed for one in candidates]
    add(
        "tokens/s per GPU",
        (explain.amount(one.tokens_per_s_per_gpu) for one in speeds),
        always=True,
    )
    add("TFLOP/s per GPU", (f"{one.model_tflops_per_gpu:.0f}" for one in speeds), always=True)
    add("MFU", (explain.percent(one.mfu) for one in speeds), always=True)
    add("causal MFU", (explain.percent(one.mfu_causal) for one in speeds), always=True)
    add("HFU", (explain.percent(one.hfu) for one in speeds), always=True)
    return _section(
        "The best few that differ" if len(candidates) > 1 else "The layout",
        _table(
            "Layouts, fastest first. Batch: sequences in a micro-batch × micro-batches a step on "
            "each replica. MFU: non-causal attention, causal beside it.",
            [*columns],
            zip(*columns.values(), strict=True),
            kind="ranked",
        ),
    )


# Why not otherwise.


def _others(answer: Answer, table: Hardware) -> str:
    said = [] if answer.question.fixed else [alternatives.textbook(answer)]
    if answer.fits:
        said.append(alternatives.cost_of_constraints(answer))
    said += [f"{rival.name}: {rival.verdict}" for rival in alternatives.rivals(answer)]
    remedies = _list(alternatives.remedies(answer, table))
    others = _list(text for text in said if text)
    return (_section("What would fit", remedies) if remedies else "") + (
        _section("Why not otherwise", others) if others else ""
    )


def _rejected(answer: Answer) -> str:
    """Layouts that do not fit: of each kind the one that comes nearest."""
    groups = answer.plan.rejected
    if not groups:
        return ""
    limit = groups[0].example.limit
    bars = [
        _bar(group.example, group.example.memory, explain.MEMORY_PARTS)
        for group in groups
        if group.example.memory.total <= _FAR * limit
    ]
    count = sum(group.count for group in groups)
    return _section(
        "What does not fit",
        _p(f"{count:,} of {answer.plan.considered:,} layouts. Of each kind, the leanest:"),
        _table(
            f"Kinds of layouts that need more than {explain.gib(limit)}",
            ["kind", "the leanest", "layouts", "GiB"],
            (
                [
                    group.reason,
                    explain.brief(group.example),
                    f"{group.count:,}",
                    f"{group.example.memory.total:,.1f}",
                ]
                for group in groups
            ),
            text=2,
        ),
        _chart("rejected", bars, _memory_measure(), limit) if bars else "",
    )
