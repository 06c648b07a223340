"""When a pipe gets the current state of an unfinished line."""

from dtrain_cli.views.bars import BETWEEN_BARS, Bars


def test_a_changed_bar_is_shown_at_intervals() -> None:
    bars: Bars[str] = Bars()
    bars.update(0.0, "rank 0", "10%", ended=False)
    bars.update(20.0, "rank 0", "50%", ended=False)
    assert bars.due == BETWEEN_BARS
    assert list(bars.take(BETWEEN_BARS - 1)) == []
    assert list(bars.take(BETWEEN_BARS)) == [("rank 0", "50%")]
    assert list(bars.take(2 * BETWEEN_BARS)) == []  # It has not changed.
    bars.update(2 * BETWEEN_BARS, "rank 0", "90%", ended=False)
    assert list(bars.take(3 * BETWEEN_BARS)) == [("rank 0", "90%")]


def test_a_complete_line_is_not_a_bar() -> None:
    bars: Bars[str] = Bars()
    bars.update(0.0, "rank 0", "10%", ended=False)
    bars.update(1.0, "rank 1", "10%", ended=False)
    bars.update(2.0, "rank 0", "", ended=True)
    assert bars.due == 1.0 + BETWEEN_BARS
    bars.update(3.0, "rank 1", "next bar", ended=True)
    assert list(bars.take(2.9 + BETWEEN_BARS)) == []
    assert list(bars.take(3.0 + BETWEEN_BARS)) == [("rank 1", "next bar")]
