"""The layouts that `dtrain plan` found, for a person: what to do, what it costs, why not else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from dtrain.framing import clean
from dtrain.parallelism.answer import alternatives, explain
from dtrain.parallelism.cluster.hardware import Hardware
from dtrain.parallelism.cost.candidate import Candidate
from dtrain.parallelism.question import Answer, Question
from dtrain_cli.views.paper import BOLD, DIM, GREEN, RED, Paper, entry, paragraph
from dtrain_cli.views.question import described, training_time


def as_text(
    answer: Answer,
    table: Hardware,
    paper: Paper,
    *,
    count: int,
    notes: Sequence[str] = (),
    written: Sequence[str] = (),
) -> str:
    """The whole view, which ends with a newline.

    ``count`` layouts are compared; ``notes`` are about the question, ``written`` about files.
    """
    sections = [
        question(answer.question, notes, paper),
        _result(answer, paper),
        _memory(answer.best, paper),
        _time(answer.best, paper),
        _table(answer.shortlist(count), paper),
        _others(answer, table, paper),
        (line for text in written for line in entry("Written", clean(text), paper)),
    ]
    text = "\n\n".join("\n".join(lines) for section in sections if (lines := [*section])) + "\n"
    return paper.finish(text)


def question(asked: Question, notes: Sequence[str], paper: Paper) -> Iterator[str]:
    """What was planned for, and where each part of it comes from."""
    for title, text in described(asked, notes):
        yield from entry(title, text, paper)


def _result(answer: Answer, paper: Paper) -> Iterator[str]:
    best, question = answer.best, answer.question
    if answer.fits:
        yield from paragraph(explain.headline(best), paper, BOLD)
        yield from paragraph(explain.figures(best), paper)
        yield from paragraph(training_time(answer), paper)
        return
    gpus = f"{question.cluster.gpus:,} × {question.cluster.gpu.name}"
    if question.pinned:
        said = f"This layout does not fit on {gpus}: {explain.brief(best)}."
    elif question.fixed:
        said = f"No layout that was asked for fits on {gpus}. Nearest: {explain.brief(best)}."
    else:
        said = f"Nothing fits on {gpus}. Nearest: {explain.brief(best)}."
    yield from paragraph(said, paper, RED)
    yield from paragraph(explain.headline(best), paper)


def _memory(best: Candidate, paper: Paper) -> Iterator[str]:
    parts = {title: getattr(best.memory, name) for name, title in explain.MEMORY_PARTS.items()}
    yield paper.paint("Memory", BOLD)
    yield from paragraph(explain.fullness(best), paper, 0 if best.fits else RED)
    yield from _stairs(parts, max(best.limit, best.memory.total), best.limit, explain.gib, paper)


def _time(best: Candidate, paper: Paper) -> Iterator[str]:
    parts = {title: getattr(best.time, name) for name, title in explain.TIME_PARTS.items()}
    total = best.time.total
    yield paper.paint("Time of a step", BOLD)
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
        bar = paper.paint("".join(cells).rstrip(), RED if over else GREEN)
        yield (
            f"  {title:<{widths[0]}}  {amount:>{widths[1]}}  "
            f"{paper.paint(f'{share:>{widths[2]}}', DIM)}  {bar}"
        ).rstrip()


_TITLES = {
    "tensor": "TP", "pipeline": "PP", "context": "CP", "expert": "EP", "data": "DP",
    "recompute": "again",
}  # fmt: skip
"""What columns are called where there is little room."""
_TEXTS = ("sharding", "recompute", "offload")


def _table(candidates: Sequence[Candidate], paper: Paper) -> Iterator[str]:
    if len(candidates) < 2:
        return
    yield paper.paint("The best few that differ", BOLD)
    columns = _columns(candidates)
    widths = {title: max(len(title), *map(len, values)) for title, values in columns.items()}
    short = sum(widths.values()) + 2 * len(widths) > paper.columns
    titles = {title: _TITLES.get(title, title) if short else title for title in columns}
    widths = {
        title: max(len(titles[title]), *map(len, values)) for title, values in columns.items()
    }

    def row(cells: Mapping[str, str]) -> str:
        padded = (
            f"{cells[title]:<{width}}" if title in _TEXTS else f"{cells[title]:>{width}}"
            for title, width in widths.items()
        )
        return "  " + "  ".join(padded).rstrip()

    yield paper.paint(row(titles), DIM)
    for number in range(len(candidates)):
        line = row({title: values[number] for title, values in columns.items()})
        yield paper.paint(line, BOLD) if number == 0 else line
    yield from paragraph(_legend(titles, columns), paper, DIM, indent="  ")


def _columns(candidates: Sequence[Candidate]) -> dict[str, list[str]]:
    """The table by column; one that says nothing is left out."""
    layouts = [candidate.layout for candidate in candidates]
    every: dict[str, list[str]] = {
        "tensor": [str(layout.tensor) for layout in layouts],
        "pipeline": [
            f"{layout.pipeline}×{layout.virtual_pipeline}"
            if layout.virtual_pipeline > 1
            else str(layout.pipeline)
            for layout in layouts
        ],
        "context": [str(layout.context) for layout in layouts],
        "expert": [str(layout.expert) for layout in layouts],
        "data": [str(layout.data) for layout in layouts],
        "sharding": [explain.SHARDING[layout.sharding] for layout in layouts],
        "batch": [f"{layout.micro_batch}×{layout.grad_accumulation}" for layout in layouts],
        "recompute": [layout.recompute for layout in layouts],
        "offload": ["yes" if layout.offload else "no" for layout in layouts],
        "GiB": [f"{one.memory.total:,.1f}" for one in candidates],
        "step": [explain.seconds(one.time.total) for one in candidates],
        "MFU": [explain.percent(one.speed.mfu) for one in candidates],
        "causal": [explain.percent(one.speed.mfu_causal) for one in candidates],
    }
    optional = ("context", "expert", "sharding", "recompute", "offload")
    return {
        title: values
        for title, values in every.items()
        if title not in optional or set(values) - {"1", "none", "no"}
    }


def _legend(titles: Mapping[str, str], columns: Mapping[str, list[str]]) -> str:
    said = [f"{short} {title}" for title, short in titles.items() if short != title]
    if "again" in titles.values():
        said.remove("again recompute")
        said.append("again: what is recomputed")
    said.append("batch: sequences in a micro-batch × micro-batches a step")
    if any("×" in value for value in columns["pipeline"]):
        said.append("pipeline: stages × pieces of each")
    said.append("MFU: with non-causal attention, then with causal")
    return "; ".join(said) + "."


def _others(answer: Answer, table: Hardware, paper: Paper) -> Iterator[str]:
    """Why not otherwise; and where nothing fits, what would."""
    remedies = alternatives.remedies(answer, table)
    if remedies:
        title = "Without offload" if answer.fits else "What would fit"
        yield paper.paint(title, BOLD)
        for sentence in remedies:
            yield from paragraph(f"- {sentence}", paper, indent="  ", hang="    ")
    said = [
        text for text in (alternatives.textbook(answer),) if text and not answer.question.pinned
    ]
    if answer.fits and (cost := alternatives.cost_of_constraints(answer)):
        said.append(cost)
    rivals = alternatives.rivals(answer)
    if not said and not rivals:
        return
    if remedies:
        yield ""
    yield paper.paint("Why not otherwise", BOLD)
    for text in said:
        yield from paragraph(f"- {text}", paper, indent="  ", hang="    ")
    for rival in rivals:
        yield from paragraph(f"- {rival.sentence}", paper, indent="  ", hang="    ")
