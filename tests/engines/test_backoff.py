"""Pauses between attempts."""

from __future__ import annotations

from dtrain.engines.backoff import Backoff


def test_pauses_double_up_to_the_longest_and_begin_again_after_a_success() -> None:
    backoff = Backoff(0.25, 5.0)
    assert [backoff.next() for _ in range(7)] == [0.25, 0.5, 1, 2, 4, 5, 5]
    backoff.reset()
    assert backoff.next() == 0.25
