"""Numbers and nouns in messages."""

from __future__ import annotations

import pytest

from dtrain.wording import counted, in_bytes, short


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [
        (0, "host", "0 hosts"),
        (1, "host", "1 host"),
        (2048, "process", "2,048 processes"),
        (2, "micro-batch", "2 micro-batches"),
    ],
)
def test_nouns_follow_their_number(number: int, noun: str, text: str) -> None:
    assert counted(number, noun) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (6.27, "6.27"),
        (999.4, "999"),
        (999.6, "1k"),
        (999_700, "1M"),
        (6_650, "6.65k"),
        (1.2e9, "1.2G"),
        (5e15, "5e+03T"),
    ],
)
def test_three_digits_and_a_unit(number: float, text: str) -> None:
    assert short(number) == text


def test_bytes_have_a_space_before_their_unit() -> None:
    assert [in_bytes(150), in_bytes(12_300)] == ["150 B", "12.3 kB"]
