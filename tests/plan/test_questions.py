"""The planner answers questions as an expert expects: some of each kind.
`scripts/planner/questions.py` asks all."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from dtrain import api
from dtrain_cli import app
from planner.questions import Ended, asked, meets, questions

pytestmark = pytest.mark.slow

SAMPLE = [question for kind in questions().values() for question in kind[::3]]


def once(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which runs for its first call alone. Later calls have the same result."""
    results: list[Any] = []

    def call(*args: Any, **options: Any) -> Any:
        if not results:
            results.append(function(*args, **options))
        return results[0]

    return call


@pytest.mark.parametrize("question", SAMPLE, ids=lambda question: question["plan"])
def test_an_answer_is_as_an_expert_expects(
    question: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # One search for both forms of the answer.
    monkeypatch.setattr(api, "plan", once(api.plan))

    def run(argv: Sequence[str]) -> Ended:
        monkeypatch.setattr(sys, "argv", ["dtrain", *argv])
        code = app.run()
        return code, *capfd.readouterr()

    wrong, answer = asked(question, run)
    assert not wrong, f"{wrong} in {answer}, but: {question['because']}"


def test_no_question_is_asked_twice() -> None:
    every = [question for kind in questions().values() for question in kind]
    assert len({str(question) for question in every}) == len(every)
    assert all(question["expect"] and question["because"] for question in every)


@pytest.mark.parametrize(
    ("bound", "value", "met"),
    [
        ("1 or 2", 2, True),
        ("1 or 2", 4, False),
        (8, 8, True),
        ("at least 8", 4, False),
        ("at most 2", 2, True),
        ("1.5k to 2k", 1600.0, True),
        ("1.5k to 2k", 2100.0, False),
        ("none or full", "full", True),
        ("none or full", "hybrid", False),
        (True, False, False),
        ("0.1 to 0.5", None, False),
    ],
)
def test_bounds(bound: object, value: object, met: bool) -> None:
    assert meets(bound, value) == met
