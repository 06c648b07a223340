"""Lines in which programs print their progress."""

from __future__ import annotations

import math

import pytest

from dtrain.spec.progress_line import PrintedLine, fault


@pytest.mark.parametrize(
    ("pattern", "line", "numbers"),
    [
        (
            "iter {step}: loss {loss},",
            "iter 30: loss 4.1123, time 115.85ms",
            {"step": 30, "loss": 4.1123},
        ),
        (
            "step {step} * loss: {loss} * tok/sec: {tokens/s}",
            "step 00012 (1.20%) | loss: 8.317 | dt: 12ms | tok/sec: 1,234 | epoch: 1",
            {"step": 12, "loss": 8.317, "tokens/s": 1234.0},
        ),
        (
            "step {step}/{total} *loss {loss}",
            "step    1/10 | train loss 9.5",
            {"step": 1, "total": 10, "loss": 9.5},
        ),
        (
            "step: {step} loss: {loss}",
            "[rank0] step:  1  loss:12.2 grad: 3",
            {"step": 1, "loss": 12.2},
        ),
        (
            '{"step": {step}, "loss": {loss}}',
            '{"step": 6, "loss": 1e-3}',
            {"step": 6, "loss": 1e-3},
        ),
        ("step {step} loss {loss}", "step 1_000 loss -.5", {"step": 1000, "loss": -0.5}),
        ("* {step} of", "at 7 of 9", {"step": 7}),
        ("tokens {tokens}, loss {loss}.", "tokens 1,234, loss 4.5.", {"tokens": 1234, "loss": 4.5}),
        ("step {step} loss {loss}", "step 5, loss 4. lr 3", {"step": 5, "loss": 4}),
        ("{epoch}.{step}: {loss}", "3.250: 4.5", {"epoch": 3, "step": 250, "loss": 4.5}),
        ("({step},{total})", "(5,10)", {"step": 5, "total": 10}),
        ("({step}, {total})", "(1,005, 10)", {"step": 1005, "total": 10}),
        ("'loss': '{loss}'", "{'loss': '6.952', 'epoch': '0.13'}", {"loss": 6.952}),
    ],
)
def test_numbers_of_a_line(pattern: str, line: str, numbers: dict[str, float]) -> None:
    assert PrintedLine(pattern).read(line) == numbers


def test_a_loss_that_is_not_a_number() -> None:
    found = PrintedLine("step {step} loss {loss}").read("step 3 loss NaN")
    assert found is not None
    assert math.isnan(found["loss"])


@pytest.mark.parametrize(
    "line", ["", "step", "step x loss 2", "loss 2 step 3", "step 3: val 2", "step-3 loss 2"]
)
def test_other_lines(line: str) -> None:
    assert PrintedLine("step {step} * loss {loss}").read(line) is None


def test_two_numbers_with_a_space_between_are_not_the_digits_of_one() -> None:
    pattern = PrintedLine("{step} {loss}")
    assert pattern.read("loaded 12345 samples") is None
    found = pattern.read("100   4.11")
    assert found is not None
    assert (found["step"], found["loss"]) == (100, 4.11)


def test_a_long_row_of_digits_is_soon_read() -> None:
    """If numbers could share its digits, it would take a minute."""
    assert PrintedLine("{a} {b} {c} {step} x").read("1" * 1024) is None


def test_a_hostile_line_takes_no_longer_than_any_other() -> None:
    """With one expression for the whole pattern, it would take hours."""
    pattern = PrintedLine("a {step} *" + "b*" * 20 + "c {loss}")
    assert pattern.read("a 1 " + "b 1 " * 1000) is None
    for text in ("1,", "1_", "1"):
        for pattern in map(PrintedLine, ("{a} {b} {c} {step}", "1{step} {total}", "{a},{step} x")):
            assert pattern.read(text * 50_000) is None


@pytest.mark.parametrize(
    ("pattern", "wrong"),
    [
        ("a loss", "has no number, such as {step}"),
        ("step {step} of {step}", "has {step} twice"),
        ("step {step}0", "has a digit right after a number, {step}0"),
        ("step {step}{loss}", "has nothing between the numbers {step}{loss}"),
        ("step {step}" + "".join(f" {{m{n}}}" for n in range(32)), "more than 32"),
        ("step {step}, {1} of {} and {a-b}", ""),
    ],
)
def test_patterns_that_cannot_be_used(pattern: str, wrong: str) -> None:
    assert wrong in fault(pattern)
    assert bool(fault(pattern)) is bool(wrong)
