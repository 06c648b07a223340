"""What a feed keeps for a receiver that takes nothing, and the order of calls and output."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dtrain.runs import arrival_times, events
from dtrain.runs.log_store import Stream
from dtrain.session.reporting.feed import MAX_CALLS, Feed, RunReceiver
from support.limits import HANG, until


def receiver_of(
    lines: Callable[[Stream, str, str, int | None], object],
    *,
    timed: bool = False,
    on_event: Callable[[events.RunEvent], object] = lambda event: None,
) -> Any:
    """A receiver without a terminal."""
    return SimpleNamespace(
        limit=100,
        timed=timed,
        on_event=on_event,
        lines=lines,
        flush=lambda now: None,
        next_flush=lambda now: None,
        suspend=lambda: None,
    )


class StoppedTerminal(RunReceiver):
    """Stands still in the first notice until ``resumed``."""

    limit = 100

    def __init__(self) -> None:
        self.stopped, self.resumed = threading.Event(), threading.Event()
        self.shown: list[object] = []

    def on_event(self, event: events.RunEvent) -> None:
        if isinstance(event, events.ProgressReported):
            self.shown.append(event.report)
        else:
            self.stopped.set()
            assert self.resumed.wait(HANG)

    def finished(self, report: object, paths: object) -> None:
        self.shown.append(report)


def test_progress_does_not_fill_the_memory_while_the_terminal_is_stopped() -> None:
    terminal = StoppedTerminal()
    feed = Feed(terminal)
    feed.notice("first")
    assert terminal.stopped.wait(HANG)
    for number in range(MAX_CALLS + 100):
        report: Any = number
        feed.on_event(events.ProgressReported("host", report))
    terminal.resumed.set()
    feed.close()
    assert feed.wait(HANG)
    assert terminal.shown == [*range(MAX_CALLS)]


def test_a_feed_that_is_closed_after_the_end_shows_the_report() -> None:
    terminal = StoppedTerminal()
    feed = Feed(terminal)
    feed.notice("first")
    assert terminal.stopped.wait(HANG)
    report: Any = "report"
    feed.on_event(events.Finished(report))
    feed.close()
    terminal.resumed.set()
    assert feed.wait(HANG)
    assert terminal.shown == ["report"]


def test_skipped_output_is_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream("a", "worker", 0, 0, "stdout", tmp_path / "worker-0.out")
    stream.path.write_bytes(b"old\nnew\n")
    shown: list[str] = []
    receiver = receiver_of(lambda stream, text, partial, second: shown.append(text))
    take = Feed._take_grown
    caller: list[threading.Thread] = []
    called = threading.Event()

    def interrupted(feed: Feed) -> dict[Stream, int]:
        """The caller's two calls, as far as they get, come between two steps of the feed."""
        if not caller:

            def call() -> None:
                feed.skip(stream, 4)
                feed.output(stream, 8)
                called.set()

            caller.append(threading.Thread(target=call))
            caller[0].start()
            caller[0].join(0.2)
        return take(feed)

    monkeypatch.setattr(Feed, "_take_grown", interrupted)
    feed = Feed(receiver)
    feed.on_event(events.HostState("a", "running"))
    assert called.wait(HANG)
    feed.close()
    assert feed.wait(HANG)
    assert shown == ["new\n"]


def test_a_line_ends_at_a_hole(tmp_path: Path) -> None:
    """Its user has emptied the file: the rest of the line is lost."""
    stream = Stream("a", "worker", 0, 0, "stdout", tmp_path / "worker-0.out")
    stream.path.write_bytes(b"one\nhalf")
    with stream.path.open("r+b") as file:
        os.pwrite(file.fileno(), b"way\nlast\n", 1 << 30)
    shown: list[str] = []
    receiver = receiver_of(lambda stream, text, partial, second: shown.append(text))
    feed = Feed(receiver)
    feed.output(stream, stream.path.stat().st_size)
    feed.close()
    assert feed.wait(HANG)
    lines = "".join(shown).replace("\0", "").splitlines()
    assert lines == ["one", "half", "way", "last"]


@pytest.mark.parametrize("timed", [False, True])
def test_stored_output_of_several_streams_comes_in_the_order_of_its_arrival(
    tmp_path: Path, timed: bool
) -> None:
    shown: list[tuple[str, int | None]] = []
    receiver = receiver_of(
        lambda stream, text, partial, second: shown.append((text, second)), timed=timed
    )
    feed = Feed(receiver, by_arrival=True)
    # Rank 2 has lost the end of its file.
    sizes: dict[Stream, int] = {}
    ranks = {0: [(10, 2), (13, 2), (14, 0)], 1: [(11, 2), (12, 2)], 2: [(10, 2), (15, 4)]}
    with feed.pause():
        for rank, seconds in ranks.items():
            path = tmp_path / f"worker-{rank}.out"
            path.write_bytes(b"".join(b"%d\n" % (rank * 4 + n) for n in range(2 - rank // 2)))
            offset = 0
            for second, size in seconds:
                arrival_times.add(path, second, offset)
                offset += size
            sizes[Stream("a", "worker", rank, rank, "stdout", path)] = offset
            feed.output(*list(sizes.items())[-1])
    until(lambda: len("".join(text for text, _ in shown)) == 10, "the output")
    for stream, size in sizes.items():
        feed.output(stream, size)  # again
    feed.close()
    assert feed.wait(HANG)
    texts = "".join(text for text, _ in shown)
    assert texts == "0\n8\n4\n5\n1\n"
    if timed:
        assert [second for text, second in shown if text] == [10, 10, 11, 12, 13]


@pytest.mark.parametrize("by_arrival", [False, True])
def test_all_output_of_an_attempt_comes_before_that_of_the_next_one(
    tmp_path: Path, by_arrival: bool
) -> None:
    """Also the end of a line that has no newline, such as a progress bar."""
    shown: list[str] = []
    receiver = receiver_of(lambda stream, text, partial, second: shown.append(text))
    feed = Feed(receiver, by_arrival=by_arrival)
    with feed.pause():
        for attempt, rank in ((2, 0), (1, 1), (1, 0)):
            path = tmp_path / f"{attempt}-{rank}.out"
            path.write_text(f"{attempt} begins\n{attempt} ends")
            stream = Stream("a", "worker", rank, rank, "stdout", path, attempt)
            feed.output(stream, path.stat().st_size)
    feed.close()
    assert feed.wait(HANG)
    assert [int(line[0]) for text in shown for line in text.splitlines()] == [1] * 4 + [2] * 2


def test_output_that_waits_when_the_next_attempt_begins_keeps_its_lines(tmp_path: Path) -> None:
    """A line that has no end comes before that."""
    shown: list[str] = []
    reading, resumed = threading.Event(), threading.Event()

    def show(stream: Stream, text: str, partial: str, second: int | None) -> None:
        shown.extend(text.splitlines())
        if text:
            reading.set()
            assert resumed.wait(HANG)

    feed = Feed(receiver_of(show, on_event=lambda event: shown.append("begins")))
    slow, ended = (
        Stream("a", "worker", rank, rank, "stdout", tmp_path / f"{rank}.out") for rank in (0, 1)
    )
    for stream, text in ((ended, "no end"), (slow, ("x" * 98 + "\n") * 5_000)):
        stream.path.write_text(text)
        feed.output(stream, len(text))
        until(lambda: stream in feed._followed)  # noqa: B023 - called in this round
    assert reading.wait(HANG)
    feed.on_event(events.AttemptPlanned(SimpleNamespace(attempt=2)))  # type: ignore[arg-type]
    resumed.set()
    feed.close()
    assert feed.wait(HANG)
    assert set(shown) == {"x" * 98, "no end", "begins"}
    assert shown.index("no end") == shown.index("begins") - 1


@pytest.mark.parametrize("by_arrival", [False, True])
@pytest.mark.parametrize("interruption", ["mute", "pause"])
def test_an_interruption_does_not_wait_for_all_output(
    tmp_path: Path, interruption: str, by_arrival: bool
) -> None:
    streams = [
        Stream("a", "worker", index, index, "stdout", tmp_path / f"worker-{index}.out")
        for index in range(8)
    ]
    output = b"text\n" * 100_000  # for two turns
    shown: list[Stream] = []
    before: list[Stream] = []
    paused = threading.Event()

    def pause() -> None:
        with feed.pause():
            before.extend(shown)
            paused.set()

    def write(event: events.RunEvent) -> None:
        for stream in streams:
            stream.path.write_bytes(output)
            feed.output(stream, len(output))

    def lines(stream: Stream, text: str, partial: str, second: int | None) -> None:
        shown.append(stream)
        if len(shown) > 1:
            return
        if interruption == "mute":
            feed.mute()
        else:
            threading.Thread(target=pause, daemon=True).start()
            until(lambda: feed._paused, "the pause")

    # `write` runs in the feed's thread, which then finds the output of all streams.
    receiver = receiver_of(lines, on_event=write)
    feed = Feed(receiver, by_arrival=by_arrival)
    feed.notice("")
    feed.close()
    assert feed.wait(HANG)
    if interruption == "mute":
        assert shown == streams[:1]
    else:
        assert paused.wait(HANG)
        twice = [stream for stream in streams for _ in range(2)]
        assert (before, shown) == (streams[:1], twice if by_arrival else [*streams, *streams])
