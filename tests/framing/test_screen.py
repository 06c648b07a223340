"""Nested progress bars: only the last state of each line is shown."""

from itertools import pairwise
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from dtrain.framing import LineFramer, split
from dtrain.screen import ScreenFramer

NESTED = Path(__file__).with_name("nested_bars.log").read_bytes()
"""What tqdm 4.70.1 writes: bars in a bar with `tqdm.write` between them, then another bar."""
pieces = st.lists(
    st.sampled_from([b"\n", b"\r", b"a", b"bc ", b"0", b"A", b"\n" * 12, b"\n\r x\x1b[A"])
    | st.sampled_from([b"\x1b", b"\x1b[", b"\x1b[A", b"\x1b[3A", b"\x1b[2F", b"\x1b[B", b"\x1b[E"])
    | st.sampled_from([b"\x1b[2K", b"\x1b[999A", b"\x1b[0A"])
    | st.binary(max_size=4)
).map(b"".join)


def frame(data: bytes, cuts: list[int]) -> list[str]:
    framer = ScreenFramer()
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    text = "".join(framer.feed(data[begin:end]) for begin, end in pairwise(edges))
    return split(text + framer.flush())


@given(pieces, st.lists(st.integers(0, 10_000)))
def test_any_chunking_gives_the_same_lines(data: bytes, cuts: list[int]) -> None:
    assert frame(data, cuts) == frame(data, [])


@given(st.lists(st.sampled_from([b"a", b"b\r", b"\n", b"\x1b[31m", b"\x1b[B", b"\xff"])))
def test_without_a_cursor_that_moves_up_lines_are_as_ever(parts: list[bytes]) -> None:
    data, framer = b"".join(parts), LineFramer()
    assert frame(data, [3, 7]) == split(framer.feed(data) + framer.flush())


def test_nested_bars_of_tqdm_leave_what_a_terminal_shows_at_the_end() -> None:
    bars = ("epochs:   0%", "epochs: 100%", "evaluation: 100%")
    lines = frame(NESTED, [])
    assert [line for line in lines if not line.startswith(bars)] == [
        "begin",
        "epoch 0: loss 0.0",
        "epoch 1: loss 0.1",
        "epoch 2: loss 0.2",
        "done",
        "bye",
    ]
    assert [line.partition("|")[0].strip() for line in lines if line.startswith(bars)] == [
        bars[0],  # Nothing says before the first redrawing that the line will change.
        bars[1],
        bars[2],
    ]


def test_all_bars_are_the_state_of_the_line_that_has_not_ended() -> None:
    framer = ScreenFramer()
    assert framer.feed(b"\router 0%\n\r inner 0%\x1b[A") == "outer 0%\n"
    assert framer.feed(b"\router 1%\n\r inner 5%\x1b[A") == ""
    assert framer.partial == "outer 1% · inner 5%"


def test_lines_after_the_bars_come_at_once_again() -> None:
    framer = ScreenFramer()
    framer.feed(b"a\nb\x1b[A")
    texts = [framer.feed(b"plain %d\n" % number) for number in range(30)]
    assert texts[-1] == "plain 29\n"
    assert split("".join(texts))[-30:] == [f"plain {n}" for n in range(30)]
