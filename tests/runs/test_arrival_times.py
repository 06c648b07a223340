"""When output arrived: exact to the second, whatever happened to the launcher or the disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtrain.runs.arrival_times import ArrivalTimes, add, offset_at
from dtrain.runs.folder import RunFolder
from dtrain.runs.log_store import LogWriter, Stream


@pytest.fixture
def stream(tmp_path: Path) -> Stream:
    (tmp_path / "logs").mkdir()
    return RunFolder(tmp_path).stream("gpu01", "worker-0.out", ranked=True)


def write(stream: Stream, *pieces: tuple[float, bytes]) -> None:
    """Store pieces, each at its time."""
    clock: Iterator[float] = iter([second for second, _ in pieces])
    writer = LogWriter(stream, lambda: next(clock))
    for _, data in pieces:
        writer.append(writer.size, data)


def test_each_second_has_its_part(stream: Stream) -> None:
    write(stream, (10.1, b"ab"), (10.9, b"c"), (12.0, b"de"))
    times = ArrivalTimes(stream.path)
    assert list(times.parts(0, 4)) == [(10, 3), (12, 4)]
    assert list(times.parts(4, 5)) == [(12, 5)]
    write(stream, (13.5, b"f"), (20.0, b"g"))  # another launcher
    assert list(times.parts(5, 7)) == [(13, 6), (20, 7)]
    assert list(ArrivalTimes(stream.path).parts(5, 7)) == [(13, 6), (20, 7)]


def test_a_long_stream_is_read_in_blocks(stream: Stream) -> None:
    write(stream, *((float(second), b"x") for second in range(1, 601)))
    times = ArrivalTimes(stream.path)
    assert [*times.parts(0, 300), *times.parts(300, 600)] == [(at, at) for at in range(1, 601)]


@pytest.mark.parametrize(
    ("then", "offset"), [(9.0, 0), (10.9, 0), (11.0, 3), (12.9, 3), (13.0, None)]
)
def test_where_the_output_since_a_time_begins(
    stream: Stream, then: float, offset: int | None
) -> None:
    write(stream, (10.1, b"ab"), (10.9, b"c"), (12.0, b"de"))
    assert offset_at(stream.path, then) == offset


def test_a_time_is_found_without_reading_all_times(stream: Stream) -> None:
    write(stream, (0.0, b"abc"))
    times = stream.path.with_name(".worker-0.out.times")
    os.truncate(times, 12 << 36)  # zeros: entries of second 0
    write(stream, (12.0, b"d"))
    assert offset_at(stream.path, 12.0) == 3
    assert list(ArrivalTimes(stream.path).parts(3, 4)) == [(12, 4)]


def test_output_of_an_earlier_version_has_no_times(stream: Stream) -> None:
    write(stream, (10.0, b"ab"))
    stream.path.with_name(".worker-0.out.times").unlink()
    assert list(ArrivalTimes(stream.path).parts(0, 2)) == [(None, 2)]
    assert offset_at(stream.path, 11.0) == 0
    write(stream, (12.0, b"cd"))
    assert [offset_at(stream.path, then) for then in (11.0, 12.0, 13.0)] == [0, 0, None]


def test_output_whose_time_cannot_be_stored(stream: Stream) -> None:
    times = stream.path.with_name(".worker-0.out.times")
    times.parent.mkdir()
    times.symlink_to("elsewhere")
    write(stream, (10.0, b"ab"))
    assert stream.path.read_bytes() == b"ab"
    assert list(ArrivalTimes(stream.path).parts(0, 2)) == [(None, 2)]


def test_a_clock_that_was_set_back(stream: Stream) -> None:
    write(stream, (10.0, b"a"), (5.0, b"b"))
    assert list(ArrivalTimes(stream.path).parts(0, 2)) == [(10, 1), (5, 2)]


def test_half_an_entry_of_a_full_disk_is_replaced(stream: Stream) -> None:
    write(stream, (10.0, b"a"))
    times = stream.path.with_name(".worker-0.out.times")
    times.write_bytes(times.read_bytes() + b"half")
    write(stream, (11.0, b"b"))
    assert list(ArrivalTimes(stream.path).parts(0, 2)) == [(10, 1), (11, 2)]


def test_a_launcher_that_died_before_the_output_was_stored(stream: Stream) -> None:
    write(stream, (10.0, b"a"))
    add(stream.path, 11, 1)
    write(stream, (12.0, b"b"))
    assert list(ArrivalTimes(stream.path).parts(0, 2)) == [(10, 1), (12, 2)]
