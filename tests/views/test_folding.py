"""Identical lines of several ranks become one line. No line is lost or changes its order."""

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from dtrain.framing import split
from dtrain_cli.views.folding import WINDOW, LineFolder


def test_equal_lines_wait_for_each_other():
    folder = LineFolder()
    for rank in range(4):
        folder.add(rank / 100, rank, "stdout", "loading\n")
    assert list(folder.take(0.1)) == []
    assert folder.due == WINDOW
    (line,) = folder.take(WINDOW)
    assert (line.text, line.sources) == ("loading\n", [0, 1, 2, 3])
    assert folder.due is None


def test_a_late_rank_gets_its_own_line():
    folder = LineFolder()
    folder.add(0, 0, "stdout", "x\n")
    first = list(folder.take(1))
    folder.add(1, 1, "stdout", "x\n")
    assert [line.sources for line in [*first, *folder.take()]] == [[0], [1]]


def test_lines_are_not_folded_if_it_changes_the_order_of_a_rank():
    folder = LineFolder()
    for rank, text in [(0, "a"), (0, "b"), (1, "b"), (1, "a")]:
        folder.add(0, rank, "stdout", f"{text}\n")
    lines = [(line.text, line.sources) for line in folder.take()]
    assert lines == [("a\n", [0]), ("b\n", [0, 1]), ("a\n", [1])]


def test_stdout_and_stderr_are_not_folded_together():
    folder = LineFolder()
    folder.add(0, 0, "stdout", "x\n")
    folder.add(0, 1, "stderr", "x\n")
    assert len(list(folder.take())) == 2


def test_waiting_text_is_bounded():
    folder = LineFolder()
    for number in range(3000):
        folder.add(0, 0, "stdout", f"{number:999}\n")
    (lines,) = folder.take(0)
    assert len(lines.text) == 1000 * (3000 - (512 << 10) // 1000)
    (lines,) = folder.take()
    assert lines.text.startswith(f"{3000 - (512 << 10) // 1000:999}\n")


def test_a_flood_of_equal_lines_is_folded_however_it_is_cut():
    text = "".join(f"step {number}\n" for number in range(50_000))
    folder = LineFolder()
    folder.add(0, 0, "stdout", text)
    middle = text.index("step 20000\n")
    for part in (text[:middle], text[middle:]):
        folder.add(0, 1, "stdout", part)
    for line in text.splitlines(keepends=True):
        folder.add(0, 2, "stdout", line)
    assert [(lines.text, lines.sources) for lines in folder.take()] == [(text, [0, 1, 2])]


def test_lines_of_the_same_ranks_come_together():
    folder = LineFolder()
    for rank in range(2):
        folder.add(0, rank, "stdout", f"a\nb\n{rank}\n")
    found = [(lines.text, lines.sources) for lines in folder.take()]
    assert found == [("a\nb\n", [0, 1]), ("0\n", [0]), ("1\n", [1])]


events = st.lists(
    st.tuples(
        st.floats(0, 0.1),
        st.integers(0, 3),
        st.sampled_from(["stdout", "stderr"]),
        st.one_of(st.lists(st.sampled_from("ab"), max_size=3), st.just([*"abcdeabcdefg"])),
        st.booleans(),
    )
)


@given(events)
def test_each_rank_gets_its_lines_in_its_order(steps):
    folder: LineFolder[int] = LineFolder()
    sent, got = defaultdict(list), defaultdict(list)
    shown = []
    now = 0.0
    for delay, rank, kind, lines, take in steps:
        now += delay
        folder.add(now, rank, kind, "".join(f"{line}\n" for line in lines))
        sent[rank] += [(kind, text) for text in lines]
        if take:
            shown += folder.take(now)
    shown += folder.take()
    for group in shown:
        assert len(set(group.sources)) == len(group.sources)
        for rank in group.sources:
            got[rank] += [(group.kind, text) for text in split(group.text)]
    assert got == {rank: lines for rank, lines in sent.items() if lines}
