"""Which failures are retried, and when."""

from __future__ import annotations

import pytest

from dtrain.transport.retry import LONGEST_PAUSE, Transient, pause


def longest(_low: float, high: float) -> float:
    return high


def test_pauses_double_up_to_a_bound() -> None:
    pauses = [pause(Transient.THROTTLED, attempt, 0.0, longest) for attempt in range(1, 8)]
    assert pauses == [0.25, 0.5, 1.0, 2.0, LONGEST_PAUSE, LONGEST_PAUSE, LONGEST_PAUSE]


def test_pauses_start_at_zero() -> None:
    draws: list[tuple[float, float]] = []
    pause(Transient.DROPPED, 3, 0.0, lambda low, high: draws.append((low, high)) or 0.5)  # type: ignore[func-returns-value]
    assert draws == [(0.0, 1.0)]


@pytest.mark.parametrize("kind", list(Transient))
def test_retries_of_every_kind_end(kind: Transient) -> None:
    assert pause(kind, 1, 0.0, longest) is not None
    assert pause(kind, 50, kind.value, longest) is None
    assert pause(kind, 5, kind.value - 1, longest) is None


def test_a_very_large_attempt_number_is_fine() -> None:
    assert pause(Transient.THROTTLED, 100_000, 0.0, longest) == LONGEST_PAUSE
