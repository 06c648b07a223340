"""The result of `dtrain plan` as text: the best layout, its costs, and the alternatives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.text import Text

from dtrain.framing import clean
from dtrain.parallelism.answer import alternatives, explain, units
from dtrain.parallelism.answer.remedies import remedies
from dtrain.parallelism.cost.candidate import CLOSE, Candidate
from dtrain.parallelism.question import Answer
from dtrain.wording import either
from dtrain_cli.options import as_options
from dtrain_cli.views import trials
from dtrain_cli.views.paper import Paper
from dtrain_cli.views.question import described, training_time


def as_text(
    answer: Answer,
    paper: Paper,
    *,
    count: int,
    notes: Sequence[str] = (),
    written: Sequence[str] = (),
) -> str:
    """Return the whole text, with a final newline.

    ``count`` layouts are compared. ``notes`` are about the question, ``written`` about files.
    """
    sections: list[Iterable[RenderableType]] = [
        [paper.entry(*one) for one in described(answer.question, notes)],
        _result(answer, paper),
        _memory(answer, paper),
        _time(answer.best, paper),
        _trials(answer, paper),
        _table(answer.shortlist(count), paper),
        _others(answer, paper),
        [paper.entry("Written", clean(text)) for text in written],
    ]
    return paper.sections(sections)


def _result(answer: Answer, paper: Paper) -> Iterator[RenderableType]:
    best, question = answer.best, answer.question
    if answer.fits:
        yield paper.paragraph(explain.headline(best), "bold")
        yield paper.paragraph(explain.figures(best))
        if taken := training_time(answer):
            yield paper.paragraph(taken)
        return
    gpus = f"{question.cluster.gpus:,} × {question.cluster.gpu.name}"
    if best.fits:
        text = f"The trials rule out all layouts that fit on {gpus} by the estimates."
    elif question.pinned:
        text = f"This layout does not fit on {gpus}: {explain.brief(best)}."
    elif question.fixed:
        text = f"No layout with these options fits on {gpus}. Nearest: {explain.brief(best)}."
    else:
        text = f"No layout fits on {gpus}. Nearest: {explain.brief(best)}."
    yield paper.paragraph(text, "red")
    yield paper.paragraph(explain.headline(best))


def _memory(answer: Answer, paper: Paper) -> Iterator[RenderableType]:
    best = answer.best
    parts = {title: getattr(best.memory, name) for name, title in explain.MEMORY_PARTS.items()}
    yield paper.line(("Memory", "bold"))
    yield paper.paragraph(explain.fullness(best), "" if best.fits else "red")
    if reserve := alternatives.reserve(answer):
        yield paper.paragraph(reserve)
    yield _stairs(parts, max(best.limit, best.memory.total), best.limit, units.gib, paper)


def _time(best: Candidate, paper: Paper) -> Iterator[RenderableType]:
    parts = {title: getattr(best.time, name) for name, title in explain.TIME_PARTS.items()}
    total = best.time.total
    yield paper.line(("Time of a step", "bold"))
    aside = "" if best.fits else ", if it fit"
    yield paper.line(f"{units.seconds(total)}{aside}")
    yield _stairs(parts, total, None, units.seconds, paper)


def _stairs(
    parts: Mapping[str, float],
    whole: float,
    limit: float | None,
    format_value: Callable[[float], str],
    paper: Paper,
) -> RenderableType:
    """Yield a bar for each part, which starts at the end of the previous bar, and a line at
    ``limit``."""
    rows: list[list[RenderableType]] = []
    before = 0.0
    mark = None if limit is None else limit / whole
    for title, value in parts.items():
        if value > _NEGLIGIBLE * whole:
            share = value / whole
            bar = _Bar(before, before + share, mark)
            rows.append([title, format_value(value), Text(f"{share * 100:.0f} %", "dim"), bar])
            before += share
    return paper.table("lrrb", rows, indent=2, width=paper.width)


class _Bar:
    """A bar from one share of the whole to another, with a line at ``mark``, in all available
    width. `rich.bar.Bar` cannot draw such a line.
    """

    def __init__(self, begin: float, end: float, mark: float | None) -> None:
        self._begin, self._end, self._mark = begin, end, mark

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(11, options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        room = options.max_width - 1
        begin = min(room - 1, round(self._begin * room))
        end = max(begin + 1, round(self._end * room))
        cells = [" "] * begin + ["█"] * (end - begin) + [" "] * (room + 1 - end)
        mark = room + 1 if self._mark is None else round(self._mark * room)
        if mark <= room and cells[mark] == " ":
            cells[mark] = "│"
        yield Text("".join(cells), "red" if end > mark else "green")


_TITLES = {
    "tensor": "TP", "pipeline": "PP", "context": "CP", "expert": "EP", "data": "DP",
    "recompute": "recomp",
}  # fmt: skip
"""Short column titles, for narrow terminals."""
_TEXTS = ("sharding", "recompute", "offload")
_DISPENSABLE = ("causal", "MFU", "offload", "recompute", "sharding", "batch")
"""Columns that a narrow terminal does without, in this order."""
_NEGLIGIBLE = 0.005
"""Parts below this share of the whole are left out."""


def _table(candidates: Sequence[Candidate], paper: Paper) -> Iterator[RenderableType]:
    if len(candidates) < 2:
        return
    yield paper.line(("Best distinct layouts", "bold"))
    columns = _columns(candidates)
    for titles in _titles(columns):
        align = "".join("l" if title in _TEXTS else "r" for title in titles)
        rows = zip(*(columns[title] for title in titles), strict=True)
        table = paper.table(align, rows, titles=[*titles.values()], styles=["bold"], indent=2)
        if paper.fits(table):
            break
    yield table
    yield paper.paragraph(_legend(titles, columns, candidates), "dim", head="  ")


def _titles(columns: Iterable[str]) -> Iterator[Mapping[str, str]]:
    """Yield the titles of the columns to show, for narrower and narrower terminals."""
    yield {title: title for title in columns}
    shown = {title: _TITLES.get(title, title) for title in columns}
    yield shown
    for title in _DISPENSABLE:
        if title in shown:
            shown = {each: short for each, short in shown.items() if each != title}
            yield shown


def _trials(answer: Answer, paper: Paper) -> Iterator[RenderableType]:
    if not answer.trials:
        return
    yield paper.line(("Trials", "bold"))
    if rows := trials.rows(answer):
        align = "l" + "r" * (len(trials.TITLES) - 1)
        yield paper.table(align, rows, titles=[*trials.TITLES], styles=["bold"], indent=2)
        yield paper.paragraph(f"{trials.EXPLANATION}.", "dim", head="  ")
    for sentence in trials.sentences(answer):
        yield paper.paragraph(sentence, head="  - ")


def _columns(candidates: Sequence[Candidate]) -> dict[str, list[str]]:
    columns = explain.columns(candidates)
    columns.pop("pieces", None)
    columns["pipeline"] = [
        f"{layout.pipeline}×{layout.virtual_pipeline}"
        if layout.virtual_pipeline > 1
        else f"{layout.pipeline}"
        for layout in (one.layout for one in candidates)
    ]
    if not candidates[0].cluster.gpu.is_cpu:
        columns["MFU"] = [units.percent(one.speed.mfu) for one in candidates]
        columns["causal"] = [units.percent(one.speed.mfu_causal) for one in candidates]
    return columns


def _legend(
    titles: Mapping[str, str], columns: Mapping[str, list[str]], candidates: Sequence[Candidate]
) -> str:
    notes = [f"{short} {title}" for title, short in titles.items() if short != title]
    if "batch" in titles:
        notes.append("batch: sequences in a micro-batch × micro-batches a step")
    if any("×" in value for value in columns["pipeline"]):
        notes.append("pipeline: stages × virtual stages")
    notes.append(f"order: {explain.order(candidates)}")
    if "MFU" in titles:
        then = ", then with causal" if "causal" in titles else ""
        notes.append(f"MFU: with non-causal attention{then}")
    notes.append(f"steps within {units.percent(CLOSE)} of each other are too close to call")
    if left_out := [title for title in columns if title not in titles]:
        notes.append(f"no room here for {either(left_out, 'and')}")
    return "; ".join(notes) + "."


def _others(answer: Answer, paper: Paper) -> Iterator[RenderableType]:
    """Yield why other layouts are worse and, if no layout fits, what would fit."""
    changes = remedies(answer)
    if changes:
        title = "Without offload" if answer.fits else "What would fit"
        yield paper.line((title, "bold"))
        for sentence in changes:
            yield paper.paragraph(as_options(sentence), head="  - ")
    rivals = (rival.sentence for rival in alternatives.rivals(answer))
    reasons = [*alternatives.reasons(answer), *rivals]
    if not reasons:
        return
    if changes:
        yield paper.line()
    yield paper.line(("Why not another layout", "bold"))
    for text in reasons:
        yield paper.paragraph(text, head="  - ")
