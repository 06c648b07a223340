"""Lines that the program of a trial prints, and lines of hostile programs."""

from __future__ import annotations

import json

import pytest

from dtrain.messages.trial import MARK, MAX_LINE, TrialLine, trial_line

GOOD = {"layers": 2, "micro_batches": 4, "seconds": 0.5, "fastest": 0.4}


def line(**changed: object) -> str:
    return MARK + json.dumps({**GOOD, **changed})


def test_a_measurement() -> None:
    assert trial_line(line(allocated=1e9, steps=5)) == TrialLine(2, 4, 0.5, 0.4, 1e9)
    assert trial_line(line(resident=2e9)) == TrialLine(2, 4, 0.5, 0.4, None, 2e9)


@pytest.mark.parametrize(
    "text",
    [
        "step 1", MARK, MARK + "[]", MARK + '{"layers": 2}', line(seconds=-1), line(seconds=0),
        line(seconds="0.5"), line(layers=0), line(layers=1 << 30), line(allocated=1e300),
        MARK + '{"layers":2,"micro_batches":4,"seconds":NaN,"fastest":1}',
        line(more="x" * MAX_LINE),
        MARK + "[" * 2000, MARK + "\udcff",
    ],
)  # fmt: skip
def test_other_lines_are_no_measurements(text: str) -> None:
    assert trial_line(text) is None
