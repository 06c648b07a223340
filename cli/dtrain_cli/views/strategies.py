"""What TensorFlow can do with a model on a cluster, for a person."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dtrain.parallelism.answer import explain
from dtrain.parallelism.question import Question
from dtrain.parallelism.tensorflow.verdict import TensorFlowPlan
from dtrain_cli.views.layouts import question as asked
from dtrain_cli.views.paper import BOLD, RED, Paper, paragraph


def as_text(
    question: Question, found: TensorFlowPlan, paper: Paper, notes: Sequence[str] = ()
) -> str:
    """The whole view, which ends with a newline."""
    sections = [
        asked(question, notes, paper),
        paragraph(found.sentence, paper, BOLD if found.strategy else RED),
        _strategies(found, paper),
        _assignment(found, paper),
        _notes(found, paper),
    ]
    text = "\n\n".join("\n".join(lines) for section in sections if (lines := [*section])) + "\n"
    return paper.finish(text)


def _strategies(found: TensorFlowPlan, paper: Paper) -> Iterator[str]:
    yield paper.paint("Strategies of tf.distribute", BOLD)
    for verdict in found.verdicts:
        word = "fits" if verdict.fits else "does not fit"
        text = f"- {verdict.name} {word}: {verdict.reason}"
        yield from paragraph(text, paper, indent="  ", hang="    ")


def _assignment(found: TensorFlowPlan, paper: Paper) -> Iterator[str]:
    """Which layers go to which GPU where the model is split by hand."""
    if found.assignment is None:
        return
    yield paper.paint("Split by hand over the GPUs of each host (tf.device)", BOLD)
    width = max(len(placed.what) for placed in found.assignment.gpus)
    for placed in found.assignment.gpus:
        total = placed.memory.total
        line = f"  GPU:{placed.gpu}  {placed.what:<{width}}  {explain.gib(total):>10}"
        yield line if total <= found.limit else paper.paint(line, RED)


def _notes(found: TensorFlowPlan, paper: Paper) -> Iterator[str]:
    for note in found.notes:
        yield from paragraph(note, paper)
