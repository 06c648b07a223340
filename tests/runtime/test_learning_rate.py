from __future__ import annotations

import itertools

import pytest

from dtrain.runtime import learning_rate


def test_scaling_by_the_global_batch() -> None:
    assert learning_rate.scaled(0.1, 8192, 256) == pytest.approx(3.2)  # arXiv 1706.02677
    assert learning_rate.scaled(1e-3, 1024, 256, "sqrt") == pytest.approx(2e-3)
    with pytest.raises(ValueError, match="at least 1"):
        learning_rate.scaled(0.1, 0, 256)


def test_warm_up_climbs_to_the_rate_and_stays() -> None:
    rates = [learning_rate.warmed_up(1.0, step, 4) for step in range(6)]
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert learning_rate.warmed_up(1.0, 0, 0) == 1.0


def test_a_cosine_falls_from_the_rate_to_its_last_part() -> None:
    rates = [learning_rate.cosine(1.0, step, 100, warmup=10) for step in range(120)]
    assert rates[9] == rates[10] == 1.0
    assert rates[55] == pytest.approx(0.55)
    assert rates[100] == rates[119] == pytest.approx(0.1)
    assert all(later <= earlier for earlier, later in itertools.pairwise(rates[10:]))
