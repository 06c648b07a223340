"""Identical lines of several ranks become one line. No line is lost or changes its order."""

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from dtrain_cli.views.folding import WINDOW, LineFolder


def test_equal_lines_wait_for_each_other():
    folder = LineFolder()
    for rank in range(4):
        folder.add(rank / 100, rank, "stdout", "loading")
    assert list(folder.take(0.1)) == []
    assert folder.due == WINDOW
    (line,) = folder.take(WINDOW)
    assert (line.text, line.sources) == ("loading", [0, 1, 2, 3])
    assert folder.due is None


def test_a_late_rank_gets_its_own_line():
    folder = LineFolder()
    folder.add(0, 0, "stdout", "x")
    first = list(folder.take(1))
    folder.add(1, 1, "stdout", "x")
    assert [line.sources for line in [*first, *folder.flush()]] == [[0], [1]]


def test_lines_are_not_folded_if_it_changes_the_order_of_a_rank():
    folder = LineFolder()
    for rank, text in [(0, "a"), (0, "b"), (1, "b"), (1, "a")]:
        folder.add(0, rank, "stdout", text)
    lines = [(line.text, line.sources) for line in folder.flush()]
    assert lines == [("a", [0]), ("b", [0, 1]), ("a", [1])]


def test_stdout_and_stderr_are_not_folded_together():
    folder = LineFolder()
    folder.add(0, 0, "stdout", "x")
    folder.add(0, 1, "stderr", "x")
    assert len(list(folder.flush())) == 2


def test_waiting_lines_are_bounded():
    folder = LineFolder()
    for number in range(50_000):
        folder.add(0, 0, "stdout", str(number))
    assert len(list(folder.take(0))) == 30_000


events = st.lists(
    st.tuples(
        st.floats(0, 0.1),
        st.integers(0, 3),
        st.sampled_from(["stdout", "stderr"]),
        st.sampled_from("ab"),
        st.booleans(),
    )
)


@given(events)
def test_each_rank_gets_its_lines_in_its_order(steps):
    folder: LineFolder[int] = LineFolder()
    sent, got = defaultdict(list), defaultdict(list)
    shown = []
    now = 0.0
    for delay, rank, kind, text, take in steps:
        now += delay
        folder.add(now, rank, kind, text)
        sent[rank].append((kind, text))
        if take:
            shown += folder.take(now)
    shown += folder.flush()
    for line in shown:
        assert len(set(line.sources)) == len(line.sources)
        for rank in line.sources:
            got[rank].append((line.kind, line.text))
    assert got == sent
