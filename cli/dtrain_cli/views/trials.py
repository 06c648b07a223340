"""The trials of `dtrain plan --trials` as rows of a table and sentences. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from dtrain.framing import clean
from dtrain.parallelism.answer import explain, units
from dtrain.parallelism.question import Answer
from dtrain.parallelism.trial import Trial

TITLES = ("layout", "layers", "batches", "predicted", "measured", "estimate", "corrected")
EXPLANATION = (
    "predicted and measured: a step of a small model with these layers and micro-batches; estimate "
    "and corrected: the whole step, before the trials and with them; other layouts are corrected "
    "by what the trials have in common"
)


def _ranked(answer: Answer) -> list[Trial]:
    """The trials, in the order of their results: failed ones last."""
    return sorted(
        answer.trials, key=lambda one: (not (one.ok and one.fits), one.corrected.time.total)
    )


def rows(answer: Answer) -> list[tuple[str, ...]]:
    """One row for each trial that trained, fastest first."""
    return [_row(trial) for trial in _ranked(answer) if trial.ok]


def _row(trial: Trial) -> tuple[str, ...]:
    largest = trial.largest
    return (
        explain.brief(trial.planned),
        str(largest.case.layers),
        f"{trial.planned.layout.micro_batch}×{largest.case.micro_batches}",
        units.seconds(trial.expected),
        units.seconds(largest.seconds),
        units.seconds(trial.planned.time.total),
        units.seconds(trial.corrected.time.total),
    )


def sentences(answer: Answer) -> Iterator[str]:
    """What the trials say about memory, and why some failed."""
    for trial in _ranked(answer):
        name = explain.brief(trial.planned)
        if trial.ok and not trial.fits and trial.memory is not None:
            limit = units.gib(trial.planned.limit)
            yield (
                f"{name} is left out: by its trial it needs {units.gib(trial.memory)}, and "
                f"{limit} are usable."
            )
        elif trial.out_of_memory:
            yield f"{name} is left out: it ran out of memory. {_cause(trial)}"
        elif not trial.ok:
            yield f"{name} did not train, so its time is not measured: {_cause(trial)}"


def _cause(trial: Trial) -> str:
    logs = f" (dtrain logs {trial.run})" if trial.run else ""
    hint = f" hint: {' '.join(clean(trial.hint).split())}" if trial.hint else ""
    return f"{' '.join(clean(trial.failure).split())}{logs}.{hint}"
