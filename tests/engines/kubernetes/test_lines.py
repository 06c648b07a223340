"""Which lines of a log are new, and who wrote them."""

from __future__ import annotations

import pytest

from dtrain.engines.kubernetes.lines import (
    Cursor,
    ProcessEnd,
    ProcessLine,
    ScriptLine,
    labelled,
    stamped,
)

SECOND = 10**9


def read(cursor: Cursor, *times: int) -> list[bool]:
    """Whether each line is new, in a stream that begins now."""
    cursor.begin()
    return [cursor.is_new(time) for time in times]


def test_lines_of_one_moment_are_counted() -> None:
    cursor = Cursor()
    assert read(cursor, 5, 7, 7) == [True, True, True]
    assert read(cursor, 5, 7, 7, 7, 8) == [False, False, False, True, True]
    assert (cursor.last, cursor.count) == (8, 1)
    again = Cursor(cursor.last, cursor.count)
    assert read(again, 8, 9) == [False, True]


def test_a_log_is_read_again_from_the_second_of_the_last_line() -> None:
    cursor = Cursor()
    assert cursor.since is None
    read(cursor, 1_700_000_000 * SECOND + 999_999_999)
    assert cursor.since == "2023-11-14T22:12:20Z"
    assert Cursor(last=30 * SECOND, count=1).since == "1970-01-01T00:00:00Z"


def test_a_clock_that_steps_back_hides_no_line() -> None:
    cursor = Cursor()
    assert read(cursor, 100, 101, 90, 91, 92) == [True] * 5
    # Lines from before the step come again, until the last known one.
    assert read(cursor, 91, 100, 101, 90, 91, 91, 92, 80, 93) == [*[False] * 7, True, True]
    again = Cursor(cursor.last, cursor.count, cursor.latest)
    assert read(again, 100, 101, 80, 93, 94, 102) == [*[False] * 4, True, True]


def test_a_rotation_after_a_step_back_hides_lines_until_the_clock_has_caught_up() -> None:
    cursor = Cursor(last=92, count=1, latest=101)
    cursor.begin()
    assert [(cursor.takes_gap(time), cursor.is_new(time)) for time in (95, 102, 96)] == [
        (False, False),
        (True, True),
        (False, True),
    ]


@pytest.mark.parametrize(("times", "gap"), [([7, 8], False), ([8, 9], True)])
def test_a_gap_shows_by_the_missing_last_line(times: list[int], gap: bool) -> None:
    cursor = Cursor(7, 1)
    cursor.begin()
    found = []
    for time in times:
        found.append(cursor.takes_gap(time))
        cursor.is_new(time)
    assert any(found) is gap
    assert found.count(True) <= 1


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"1970-01-01T00:00:01.5Z text\n", (1_500_000_000, b"text\n")),
        (b"1970-01-01T01:00:01.000000007+01:00  two\n", (1_000_000_007, b" two\n")),
        (b"1970-01-01T00:00:02Z\n", (2_000_000_000, b"\n")),
        (b"text\n", None),
        (b"2026-99-99T00:00:00Z text\n", None),
    ],
)
def test_times(line: bytes, expected: tuple[int, bytes] | None) -> None:
    assert stamped(line) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"[worker-3] a [b] c", ProcessLine("worker-3", False, b"a [b] c\n")),
        (b"[worker-3 err] ", ProcessLine("worker-3", True, b"\n")),
        (b"[worker-3+]  a", ProcessLine("worker-3", False, b" a")),
        (b"[worker-3 err+] a", ProcessLine("worker-3", True, b"a")),
        (b"[dtrain] ps-0 ended: 7 at 12.5", ProcessEnd("ps-0", 7, 12.5)),
        (b"[dtrain] ps-0 ended: 7 at 1.2.3", None),
        ("[dtrain] ps-0 ended: 7 at 12٫5".encode(), ProcessEnd("ps-0", 7, 12.0)),
        (b"[dtrain] begins", ScriptLine.BEGIN),
        (b"[dtrain] ends", ScriptLine.END),
        (b"[dtrain] TERM", ScriptLine.TERM),
        (b"[dtrain] begins ", None),
        (b"[worker-0] [dtrain] begins", ProcessLine("worker-0", False, b"[dtrain] begins\n")),
        (b"bash: line 1", None),
    ],
)
def test_writers(text: bytes, expected: object) -> None:
    assert labelled(text) == expected
