"""The strategies that TensorFlow has for a model on a cluster, as text."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType

from dtrain.parallelism.answer import units
from dtrain.parallelism.tensorflow.verdict import TensorFlowPlan
from dtrain.wording import plural
from dtrain_cli.views.paper import Paper
from dtrain_cli.views.question import described


def as_text(found: TensorFlowPlan, paper: Paper) -> str:
    """Return the whole text, with a final newline."""
    sections = [
        [paper.entry(*one) for one in described(found.question, found.question.notes)],
        [paper.paragraph(found.sentence, "bold" if found.strategy else "red")],
        _strategies(found, paper),
        _assignment(found, paper),
        [paper.paragraph(note) for note in found.notes],
    ]
    return paper.sections(sections)


def _strategies(found: TensorFlowPlan, paper: Paper) -> Iterator[RenderableType]:
    yield paper.line(("Strategies of tf.distribute", "bold"))
    for verdict in found.verdicts:
        word = "fits" if verdict.fits else "does not fit"
        yield paper.paragraph(f"{verdict.name} {word}: {verdict.reason}", head="  - ")


def _assignment(found: TensorFlowPlan, paper: Paper) -> Iterator[RenderableType]:
    """The layers of each GPU, for a model that is split by hand."""
    if found.assignment is None:
        return
    units_of_host = plural(2, found.question.cluster.gpu.unit)
    yield paper.line((f"Split by hand over the {units_of_host} of each host (tf.device)", "bold"))
    placed = found.assignment.gpus
    yield paper.table(
        "llr",
        [[f"GPU:{one.gpu}", one.what, f"{units.gib(one.memory.total):>10}"] for one in placed],
        styles=["" if one.memory.total <= found.limit else "red" for one in placed],
        indent=2,
    )
