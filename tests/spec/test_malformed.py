"""The report for each malformed cluster file (golden)."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from dtrain.diagnostics import SpecError
from dtrain.spec.load import parse
from dtrain.spec.report import render_problems

FOLDER = Path(__file__).parent / "malformed"
CASES = sorted(FOLDER.glob("*.yaml"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.stem)
def test_report(case: Path, golden: Callable[[str, Path], None]) -> None:
    with pytest.raises(SpecError) as caught:
        parse(case.read_bytes(), case.name)
    for problem in caught.value.problems:
        assert problem.position is not None
        assert problem.position.line >= 1
        assert problem.position.column >= 1
    report = render_problems(caught.value)
    assert re.match(rf"error: {re.escape(case.name)}:\d+:\d+: ", report)
    assert all(line.isprintable() for line in report.splitlines())
    golden(report, case.with_suffix(".txt"))


def test_every_reference_has_a_case() -> None:
    assert {case.stem for case in CASES} == {path.stem for path in FOLDER.glob("*.txt")}
    assert len(CASES) >= 60
