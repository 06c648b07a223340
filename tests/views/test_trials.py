"""Trials in the text and in the page of a plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dtrain import PlanRequest
from dtrain.parallelism.answer import alternatives
from dtrain.parallelism.cluster.hardware import GIB
from dtrain.parallelism.question import Answer
from dtrain.parallelism.trial import MeasuredCase, Trial, cases
from dtrain.planning.question import pose
from dtrain_cli.output import stdout_paper
from dtrain_cli.views import layouts
from dtrain_cli.views.layouts_html import page


@pytest.fixture(scope="module")
def answer() -> Answer:
    """The first layout has no memory, the second takes 1.5 times as long as estimated, the third
    cannot be tried, and the fourth needs more memory than a GPU has."""
    found = pose(PlanRequest(model_size="7B", gpus=16, gpu="a100-80gb", gpus_per_host=8)).answer()
    first, second, third, fourth = found.shortlist(4)
    trials = [
        Trial(first, failure="rank 0 failed\x1b[31m", hint="a\nb", out_of_memory=True, run="r-1"),
        Trial(second),
        Trial(third, failure="no route to host"),
        Trial(fourth),
    ]
    for at, used in ((1, 1.0), (3, 100.0)):
        shell, rows = trials[at], []
        for case in cases(shell.planned.shape, shell.planned.layout):
            small = shell.small(case)
            seconds = 1.5 * small.time.total
            rows.append(MeasuredCase(case, seconds, seconds, used * small.memory.allocated * GIB))
        trials[at] = replace(shell, measured=tuple(rows))
    return replace(found, trials=tuple(trials))


def test_text(answer: Answer) -> None:
    text = " ".join(layouts.as_text(answer, stdout_paper(), count=4).split())
    assert "Trials layout layers batches predicted measured estimate corrected" in text
    assert "is left out: it ran out of memory. rank 0 failed (dtrain logs r-1). hint: a b" in text
    assert "did not train, so its time is not measured: no route to host." in text
    assert "is left out: by its trial it needs" in text
    assert f"A step of {answer.best.layout.global_batch:,} sequences takes" in text


def test_a_trial_does_not_tell_which_part_takes_longer(answer: Answer) -> None:
    alike = {rival.sentence for rival in alternatives.rivals(answer)}
    assert any("(+" in sentence for sentence in alike)
    _, second, *_ = answer.trials
    fast = replace(second.measured[0], seconds=1e-3)
    quick = replace(second, measured=(fast, *second.measured[1:]))
    apart = replace(answer, trials=(quick, *answer.trials[2:]))
    assert not any("(+" in rival.sentence for rival in alternatives.rivals(apart))


def test_page(answer: Answer) -> None:
    text = page(answer, count=4)
    assert "<h2>Trials</h2>" in text
    assert "no route to host" in text
    assert "\x1b" not in text
    assert "<h2>Trials</h2>" not in page(replace(answer, trials=()), count=4)
