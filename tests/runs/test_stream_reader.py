"""Reading a stored stream: from any place, over holes, and from its end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dtrain.runs.stream_reader import StreamReader, last_lines

FAR = 1 << 40


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "worker-0.out"


def with_hole(path: Path) -> int:
    """Output before and after a hole of a terabyte; the size."""
    path.write_bytes(b"one\ntwo\n")
    with path.open("r+b") as file:
        os.pwrite(file.fileno(), b"three\nfour\n", FAR)
    return FAR + 11


def test_pieces_end_where_they_are_wanted(path: Path) -> None:
    path.write_bytes(b"0123456789")
    reader = StreamReader(path)
    reader.offset = 1
    read = []
    for until in (2, 4, 4, 9, 9, 10):
        read.append(reader.read(until, 10, 5))
    assert read == [b"1", b"23", b"", b"45", b"678", b"9"]
    assert reader.offset == 10


def test_what_the_file_has_lost_is_skipped(path: Path) -> None:
    path.write_bytes(b"0123")
    reader = StreamReader(path)
    assert reader.read(6, 8, 8) == b"0123"
    assert (reader.read(6, 8, 8), reader.offset) == (b"", 8)


def test_a_hole_is_skipped(path: Path) -> None:
    end = with_hole(path)
    reader = StreamReader(path)
    read = b""
    for _ in range(5):
        read += reader.read(end, end, 1 << 16)
    # A file system may store zeros up to the next block.
    assert read.replace(b"\0", b"") == b"one\ntwo\nthree\nfour\n"
    assert reader.offset == end


@pytest.mark.parametrize(
    ("text", "count", "shown", "missing"),
    [
        (b"a\nb\nc\n", 2, b"b\nc\n", 0),
        (b"a\nb\nc", 2, b"b\nc", 0),
        (b"a\nb\nc\n", 3, b"a\nb\nc\n", 0),
        (b"a\nb\n", 5, b"a\nb\n", 3),
        (b"\n\n\n", 2, b"\n\n", 0),
        (b"a\n", 0, b"", 0),
        (b"", 3, b"", 3),
        (b"x" * 200_000 + b"\n" + b"y" * 200_000 + b"\nz\n", 2, b"y" * 200_000 + b"\nz\n", 0),
    ],
)
def test_the_last_lines(path: Path, text: bytes, count: int, shown: bytes, missing: int) -> None:
    path.write_bytes(text)
    begin, lacks = last_lines(path, len(text), count)
    assert (text[begin:], lacks) == (shown, missing)


def test_the_last_lines_across_a_hole(path: Path) -> None:
    end = with_hole(path)
    assert last_lines(path, end, 1) == (FAR + 6, 0)
    assert last_lines(path, end, 3) == (4, 0)
    assert last_lines(path, end, 9) == (0, 5)
