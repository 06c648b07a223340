"""Bytes to lines: any chunking, carriage returns, broken UTF-8, endless lines."""

import re
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from dtrain.framing import LineFramer, prefixed, split


def frame(data: bytes, cuts: list[int] | None = None, **options) -> list[str]:
    framer = LineFramer(**options)
    text = ""
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts or [])})
    for start, end in pairwise(edges):
        text += framer.feed(data[start:end])
    return split(text + framer.flush())


hostile = st.lists(
    st.sampled_from(
        [b"\n", b"\r", b"\r\n", b"\n\n\n", b"a", b"bc", b"x" * 40, b"\x1b[31m", b"\x00"]
    )
    | st.sampled_from([b"\xff", "é".encode(), "█".encode(), b"\xf0\x9f"])
    | st.binary(max_size=6)
).map(b"".join)


@given(hostile, st.lists(st.integers(0, 10_000)))
def test_any_chunking_gives_the_same_lines(data, cuts):
    assert frame(data, cuts, limit=32) == frame(data, limit=32)


@given(hostile, st.lists(st.integers(0, 10_000)))
def test_what_has_not_ended_is_visible(data, cuts):
    framer = LineFramer()
    framer.feed(data)
    partial = framer.partial
    assert framer.flush() in (f"{partial}\n", "") or partial == ""


@given(st.lists(st.text(st.characters(exclude_characters="\r\n\0", codec="utf-8"))))
def test_nothing_is_lost(lines):
    assert frame("".join(f"{line}\n" for line in lines).encode()) == lines


def test_zeros_are_left_out_as_on_a_terminal():
    assert frame(b"\0" * 100 + b"a\0b\n\0", [40], limit=32) == ["ab"]


def test_missing_final_newline():
    assert frame(b"one\ntwo") == ["one", "two"]
    assert frame(b"one\n") == ["one"]
    assert frame(b"\n\n") == ["", ""]
    assert frame(b"") == []


def test_carriage_returns_show_what_a_terminal_shows():
    assert frame(b"dos\r\nunix\n") == ["dos", "unix"]
    assert frame(b" 10%\r 50%\r100%\n") == ["100%"]
    assert frame(b"abcdef\rxy\n") == ["xycdef"]
    assert frame(b"long red line\r\x1b[31mshort\x1b[0m\n") == ["\x1b[31mshort\x1b[0m"]
    assert frame(b"bar\r") == ["bar"]


def test_a_bar_that_never_ends_takes_no_memory():
    framer = LineFramer()
    for percent in range(100_000):
        assert framer.feed(b"\r%6d/100000" % percent) == ""
    assert framer.partial == " 99999/100000"
    assert len(framer._head) < 20
    assert framer.flush() == " 99999/100000\n"


def test_invalid_utf_8_is_shown_as_bytes():
    assert frame(b"caf\xc3\xa9 \xff\xfe\n") == ["café \\xff\\xfe"]
    assert frame("é█😀\n".encode(), cuts=list(range(12))) == ["é█😀"]
    assert frame(b"cut \xf0\x9f\nnext\n") == ["cut \\xf0\\x9f", "next"]


def test_a_line_of_a_megabyte_is_cut_and_says_so():
    data = b"x" * (1 << 20) + b"\nafter\n"
    for cuts in ([], [5], list(range(0, 1 << 20, 4096))):
        line, after = frame(data, cuts, whole_in="worker-0.out")
        assert line == "x" * 16384 + "… (1,048,576 bytes, whole in worker-0.out)"
        assert after == "after"


def test_the_cut_does_not_split_a_character():
    (line,) = frame("█".encode() * 20 + b"\n", limit=10)
    assert line == "███… (60 bytes)"


def test_memory_is_bounded_by_the_limit():
    framer = LineFramer(limit=1000)
    for _ in range(1000):
        framer.feed(b"y" * 1000)
    assert len(framer._head) == 1000
    assert re.fullmatch(r"y{1000}… \(1,000,000 bytes\)", framer.flush()[:-1])


@given(st.lists(st.text(st.characters(exclude_characters="\n", codec="utf-8")), min_size=1))
def test_each_line_gets_its_prefix(lines):
    text = "".join(f"{line}\n" for line in lines)
    assert split(prefixed(text, "[█ 0] ")) == [f"[█ 0] {line}" for line in lines]
