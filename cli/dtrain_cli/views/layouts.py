"""The layouts that `dtrain plan` found, for a person: what to do, what it costs, why not else."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dtrain.framing import clean
from dtrain.parallelism import explain
from dtrain.parallelism.candidate import Candidate
from dtrain.parallelism.hardware import Hardware
from dtrain.parallelism.question import Answer
from dtrain_cli.views import names

_WIDEST = 110
"""Columns of text that are still pleasant to read; tables and bars stay within them too."""
_ASCII = str.maketrans({"×": "x", "█": "#", "▌": "", "│": "|", "─": "-", "…": "...", "–": "-"})
_BOLD, _DIM, _RED, _GREEN = 1, 2, 31, 32


@dataclass(frozen=True, slots=True)
class Paper:
    """What the text is written for."""

    columns: int
    color: bool
    unicode: bool
    """Whether it can show more than ASCII."""

    @property
    def width(self) -> int:
        return max(40, min(self.columns - 1, _WIDEST))

    def paint(self, text: str, code: int) -> str:
        return names.paint(text, code) if self.color and text else text


def as_text(
    answer: Answer,
    table: Hardware,
    paper: Paper,
    *,
    count: int,
    notes: Sequence[str] = (),
) -> str:
    """The whole view, which ends with a newline. ``count`` layouts are compared."""
    sections = [
        _question(answer, notes, paper),
        _result(answer, paper),
        _memory(answer.best, paper),
        _time(answer.best, paper),
        _table(answer.shortlist(count), paper),
        _others(answer, table, paper),
    ]
    text = "\n\n".join("\n".join(lines) for section in sections if (lines := [*section])) + "\n"
    return text if paper.unicode else text.translate(_ASCII).encode("ascii", "replace").decode()


def _question(answer: Answer, notes: Sequence[str], paper: Paper) -> Iterator[str]:
    """What was planned for, and where each part of it comes from."""
    question = answer.question
    shape, cluster = question.shape, question.cluster
    experts = (
        f", {shape.experts} experts of which each token uses {shape.experts_per_token}"
        if shape.experts
        else ""
    )
    active = (
        f" ({explain.large(shape.active_parameters)} active)"
        if shape.active_parameters != shape.parameters
        else ""
    )
    name = f"{clean(shape.name)}, " if shape.name else ""
    yield from _entry(
        "Model",
        f"{name}{explain.large(shape.parameters)} parameters{active}: {shape.layers} layers of "
        f"hidden size {shape.hidden:,}, {shape.heads} heads ({shape.kv_heads} for keys and "
        f"values), MLP {shape.ffn_hidden:,}{' (gated)' if shape.gated else ''}{experts}, "
        f"vocabulary {shape.vocab:,}, sequences of {shape.seq_len:,} tokens",
        paper,
    )
    wires = ""
    if cluster.hosts > 1:
        wires = (
            f" in {cluster.hosts} hosts of {cluster.gpus_per_host}, "
            f"{cluster.network * 8:g} Gb/s between hosts"
        )
    elif cluster.gpus > 1:
        wires = " in one host"
    source = f" ({clean(question.cluster_source)})" if question.cluster_source else ""
    yield from _entry(
        "Cluster",
        f"{cluster.gpus:,} × {cluster.gpu.name}{wires}{source}",
        paper,
    )
    tokens = explain.large(question.global_batch * shape.seq_len)
    source = f" ({clean(question.batch_source)})" if question.batch_source else ""
    yield from _entry(
        "Batch",
        f"{names.count(question.global_batch, 'sequence')} = {tokens} tokens a step, in "
        f"{question.precision}{source}",
        paper,
    )
    for note in notes:
        yield from _entry("Note", clean(note), paper)


def _result(answer: Answer, paper: Paper) -> Iterator[str]:
    best, question = answer.best, answer.question
    if answer.fits:
        yield from _paragraph(explain.headline(best), paper, _BOLD)
        yield from _paragraph(explain.figures(best), paper)
        if training := answer.training(best):
            yield from _paragraph(
                f"{explain.large(training.tokens)} tokens take {explain.amount(training.days)} "
                f"days on {question.cluster.gpus:,} GPUs: {training.steps:,} steps, "
                f"{training.gpu_hours:,.0f} GPU-hours, if nothing fails.",
                paper,
            )
        return
    gpus = names.count(question.cluster.gpus, question.cluster.gpu.name)
    what = "No layout that was asked for fits" if question.fixed else "Nothing fits"
    considered = answer.plan.considered
    yield from _paragraph(
        f"{what} on {gpus} ({considered:,} looked at). The nearest is {explain.brief(best)}:",
        paper,
        _RED,
    )
    yield from _paragraph(explain.headline(best), paper)


def _memory(best: Candidate, paper: Paper) -> Iterator[str]:
    parts = {title: getattr(best.memory, name) for name, title in explain.MEMORY_PARTS.items()}
    yield paper.paint("Memory", _BOLD)
    yield from _paragraph(explain.fullness(best), paper, 0 if best.fits else _RED)
    yield from _stairs(parts, max(best.limit, best.memory.total), best.limit, explain.gib, paper)


def _time(best: Candidate, paper: Paper) -> Iterator[str]:
    parts = {title: getattr(best.time, name) for name, title in explain.TIME_PARTS.items()}
    total = best.time.total
    yield paper.paint("Time of a step", _BOLD)
    aside = "" if best.fits else ", if it fitted"
    yield f"{explain.seconds(total)}{aside}"
    yield from _stairs(parts, total, None, explain.seconds, paper)


def _stairs(
    parts: Mapping[str, float],
    whole: float,
    limit: float | None,
    said: Callable[[float], str],
    paper: Paper,
) -> Iterator[str]:
    """A bar for each part, which begins where the one before it ends; ``limit`` is a line."""
    shown = {title: value for title, value in parts.items() if value > 0.0005 * whole}
    rows = [(title, said(value), f"{value / whole * 100:.0f} %") for title, value in shown.items()]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    head = 2 + sum(widths) + 6
    room = max(10, paper.width - head - 1)
    mark = None if limit is None else round(limit / whole * room)
    before = 0.0
    for (title, amount, share), value in zip(rows, shown.values(), strict=True):
        start = min(room - 1, round(before / whole * room))
        before += value
        end = max(start + 1, round(before / whole * room))
        cells = [" "] * (room + 1)
        cells[start:end] = "█" * (end - start)
        if mark is not None:
            cells[mark] = "│" if cells[mark] == " " else cells[mark]
        over = mark is not None and end > mark
        bar = paper.paint("".join(cells).rstrip(), _RED if over else _GREEN)
        yield (
            f"  {title:<{widths[0]}}  {amount:>{widths[1]}}  "
            f"{paper.paint(f'{share:>{widths[2]}}', _DIM)}  {bar}"
        ).rstrip()


def _table(candidates: Sequence[Candidate], paper: Paper) -> Iterator[str]:
    if len(candidates) < 2:
        return
    yield paper.paint("The best few that differ", _BOLD)
    columns: dict[str, list[str]] = {"": [str(rank + 1) for rank in range(len(candidates))]}

    def add(title: str, values: Sequence[str], *, always: bool = False) -> None:
        if always or any(value not in ("1", "no", "none") for value in values):
            columns[title] = [*values]

    layouts = [candidate.layout for candidate in candidates]
    add("tensor", [str(layout.tensor) for layout in layouts], always=True)
    pieces = [layout.virtual_pipeline for layout in layouts]
    add(
        "pipeline",
        [
            f"{layout.pipeline}{f'×{v}' if v > 1 else ''}"
            for layout, v in zip(layouts, pieces, strict=True)
        ],
        always=True,
    )
    add("context", [str(layout.context) for layout in layouts])
    add("expert", [str(layout.expert) for layout in layouts])
    add("data", [str(layout.data) for layout in layouts], always=True)
    add("sharding", [explain.SHARDING[layout.sharding] for layout in layouts])
    add(
        "batch",
        [f"{layout.micro_batch}×{layout.grad_accumulation}" for layout in layouts],
        always=True,
    )
    add("recompute", [layout.recompute for layout in layouts])
    add("offload", ["yes" if layout.offload else "no" for layout in layouts])
    add("GiB", [f"{one.memory.total:,.1f}" for one in candidates], always=True)
    add("step", [explain.seconds(one.time.total) for one in candidates], always=True)
    add("MFU", [explain.percent(one.speed.mfu) for one in candidates], always=True)
    add("causal", [explain.percent(one.speed.mfu_causal) for one in candidates], always=True)
    widths = {title: max(len(title), *map(len, values)) for title, values in columns.items()}
    gap = "  "
    # In a narrow terminal what is least missed goes first.
    for title in ("causal", "recompute", "sharding", "step"):
        if 2 + sum(widths.values()) + 2 * len(widths) > paper.columns and title in widths:
            del widths[title]
    text = {"sharding", "recompute", "offload"}

    def row(cells: Mapping[str, str]) -> str:
        return (
            "  "
            + gap.join(
                f"{cells[title]:<{width}}" if title in text else f"{cells[title]:>{width}}"
                for title, width in widths.items()
            ).rstrip()
        )

    yield paper.paint(row({title: title for title in widths}), _DIM)
    for number in range(len(candidates)):
        line = row({title: columns[title][number] for title in widths})
        yield paper.paint(line, _BOLD) if number == 0 else line
    yield from _paragraph(
        "batch: sequences in a micro-batch × micro-batches a step"
        + ("; pipeline: stages × pieces of each" if any(v > 1 for v in pieces) else "")
        + "; MFU: non-causal attention, causal beside it" * ("causal" in widths)
        + ".",
        paper,
        _DIM,
        indent="  ",
    )


def _others(answer: Answer, table: Hardware, paper: Paper) -> Iterator[str]:
    """Why not otherwise; and where nothing fits, what would."""
    remedies = explain.remedies(answer, table)
    if remedies:
        yield paper.paint("What would fit", _BOLD)
        for sentence in remedies:
            yield from _paragraph(f"- {sentence}", paper, indent="  ", hang="    ")
        yield ""
    said = [text for text in (explain.textbook(answer),) if text and not answer.question.fixed]
    if answer.fits and (cost := explain.cost_of_constraints(answer)):
        said.append(cost)
    rivals = explain.rivals(answer)
    if not said and not rivals:
        return
    yield paper.paint("Why not otherwise", _BOLD)
    for text in said:
        yield from _paragraph(f"- {text}", paper, indent="  ", hang="    ")
    for rival in rivals:
        yield from _paragraph(f"- {rival.name}: {rival.verdict}", paper, indent="  ", hang="    ")


def _entry(title: str, text: str, paper: Paper) -> Iterator[str]:
    first, *rest = textwrap.wrap(text, paper.width - 9, break_on_hyphens=False) or [""]
    yield f"{paper.paint(f'{title:<9}', _BOLD)}{first}"
    yield from (" " * 9 + line for line in rest)


def _paragraph(
    text: str, paper: Paper, code: int = 0, *, indent: str = "", hang: str | None = None
) -> Iterator[str]:
    lines = textwrap.wrap(
        text,
        paper.width,
        initial_indent=indent,
        subsequent_indent=indent if hang is None else hang,
        break_on_hyphens=False,
    )
    for line in lines:
        yield paper.paint(line, code) if code else line
