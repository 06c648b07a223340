"""Passes the events of a run to one receiver in a separate thread, so that the run never waits.

    session threads ── events, sizes of stream files ─────────────────────> Feed
    Feed's thread   ── events, new data from the stream files ────────────> RunReceiver

Workers' output is never queued in memory. A call only gives the size of a file. When the receiver
is ready, the thread reads the file in pieces: one stream after the other, or in order of arrival.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from heapq import merge
from itertools import chain
from typing import TYPE_CHECKING

from dtrain.runs.arrival_times import ArrivalTimes
from dtrain.runs.events import (
    AttemptPlanned,
    Finished,
    NoticeShown,
    ProgressReported,
    RunEvent,
    RunLeft,
    Sampled,
)
from dtrain.runs.stream_reader import StreamReader
from dtrain.screen import ScreenFramer
from dtrain.session.reporting.observer import Observer

if TYPE_CHECKING:
    from dtrain.failures.cause import Report
    from dtrain.runs.log_store import Stream

StreamKey = tuple[str, str, int, str]
"""Host, role, index, and ``stdout`` or ``stderr``."""

_TURN = 256 << 10
"""Bytes read from one stream before the next stream gets its turn, and bytes that are passed on
before they are written. With each read and each write, the feed's thread may have to wait for its
turn in Python."""
_AHEAD, _BLOCK = 16 << 20, 4 << 10
"""Bytes that are read ahead in order of arrival: of all streams, and at least of each stream."""
BETWEEN_READS = 0.02
"""Seconds between two reads of streams that grow slowly. A call in between reads them at once."""
MAX_CALLS = 10_000
"""Waiting calls from which on progress is left out: a terminal that is stopped takes none."""


class RunReceiver:
    """Receives what a feed passes on, and ignores it; subclasses do not. All calls come from one
    thread and may block."""

    limit: int
    """Bytes of one line that are passed on. The rest of the line is cut."""
    timed = False
    """Whether to pass on when output arrived."""

    def on_event(self, event: RunEvent) -> None:
        """All events but `Finished` and `RunLeft`."""

    def lines(self, stream: Stream, text: str, partial: str, second: int | None) -> None:
        """Lines that ``stream`` completed, each with its newline, and the start of its next
        line. ``second``: when their ends arrived, since the epoch; None if it is unknown, or
        without `timed`."""

    def flush(self, now: float) -> None:
        """Write buffered output, unless it is better to wait for more."""

    def next_flush(self, now: float) -> float | None:
        """Seconds until `flush` is due even if no new data arrives."""
        return None

    def suspend(self) -> None:
        """Write everything and leave the cursor on an empty line."""

    def finished(self, report: Report, paths: Mapping[StreamKey, str]) -> None:
        """The last call. ``paths`` has each stream's file."""


class _Position:
    """How far a stream has been passed on."""

    def __init__(self, stream: Stream, receiver: RunReceiver, *, timed: bool) -> None:
        self.stream = stream
        self.framer = ScreenFramer(limit=receiver.limit, whole_in=str(stream.path))
        self.reader = StreamReader(stream.path)
        self.end = 0
        """The known size of the file."""
        self.second: int | None = None
        self._times = ArrivalTimes(stream.path) if timed else None

    def parts(self, number: int, end: int) -> Iterator[_Part]:
        """What comes before ``end``, by arrival. ``number``: the place of the stream among parts
        that arrived in the same second."""
        if self._times is None:
            yield -1, number, self, end
            return
        for second, until in self._times.parts(self.reader.offset, end):
            yield -1 if second is None else second, number, self, until


_Part = tuple[int, int, _Position, int]
"""The second of its arrival, or -1; the number of its stream; its stream, and where it ends."""


class Feed(Observer):
    """Passes a run on to a `RunReceiver`. Calls return at once."""

    def __init__(
        self,
        receiver: RunReceiver,
        wanted: Callable[[Stream], bool] = lambda stream: True,
        *,
        by_arrival: bool = False,
    ) -> None:
        """``wanted``: whether to pass on a stream's output. ``by_arrival``: whether to sort what
        waits to be read by the second of its arrival."""
        self._receiver = receiver
        self._wanted = wanted
        self._by_arrival = by_arrival
        self._wake = threading.Condition()
        self._calls: deque[Callable[[], None]] = deque()
        self._grown: dict[Stream, int] = {}
        self._waits_for_output = False
        self._samples: dict[str, Sampled] = {}
        self._paused = 0
        self._quiet = False
        self._muted = False
        # Only the feed's thread uses the fields below.
        self._followed: dict[Stream, _Position] = {}
        self._unread: dict[_Position, None] = {}
        """The streams with more data."""
        self._parts: Iterator[_Part] | None = None
        """What to read of them next; None if that is not known yet."""
        self._block = _TURN
        self._read_at = 0.0
        self._passed = 0
        """Bytes passed on since the last flush."""
        self._attempt: int | None = 1
        """Of the last part that was passed on."""
        self._ending = False
        self._report: Report | None = None
        self._error: BaseException | None = None
        self._done = threading.Event()
        threading.Thread(target=self._serve, name="dtrain-feed", daemon=True).start()

    def on_event(self, event: RunEvent) -> None:
        match event:
            case ProgressReported() if self._muted or len(self._calls) >= MAX_CALLS:
                pass
            case Sampled():
                with self._wake:
                    # Wakes nobody: only the latest sample counts, and a clock draws it.
                    self._samples[event.host] = event
            case Finished(report):
                self._end(report)
            case RunLeft():
                self._end(None)
            case AttemptPlanned(plan):

                def begin() -> None:
                    self._end_lines(plan.attempt)
                    self._receiver.on_event(event)

                self._call(begin)
            case _:
                self._call(lambda: self._receiver.on_event(event))

    def skip(self, stream: Stream, size: int) -> None:
        def skip() -> None:
            # A stream that is already being followed keeps its position.
            if stream not in self._followed:
                self._position(stream).reader.offset = size

        self._call(skip)

    def output(self, stream: Stream, size: int) -> None:
        if self._muted or not self._wanted(stream):
            return
        # Without the lock, for which the threads of hundreds of hosts would wait. Each stream has
        # one thread that calls this, and the feed only removes entries.
        if size > self._grown.get(stream, 0):
            self._grown[stream] = size
        if self._waits_for_output:
            with self._wake:
                self._wake.notify_all()

    def close(self) -> None:
        """Show nothing about the end. Call it if neither `Finished` nor `RunLeft` comes."""
        self._end(None)

    def _end(self, report: Report | None) -> None:
        def end() -> None:
            # `close` may follow `Finished`, as after `dtrain stop`.
            self._ending, self._report = True, self._report or report

        self._call(end)

    def wait(self, timeout: float | None = None) -> bool:
        """Whether the receiver got everything, including the report, within ``timeout`` seconds.
        Raises the receiver's exception."""
        done = self._done.wait(timeout)
        if self._error is not None:
            raise self._error
        return done

    def mute(self) -> None:
        """Pass on no more output of workers, also none that waits. The files have it."""

        def drop() -> None:
            self._parts = None
            self._unread.clear()

        self._muted = True
        self._call(drop)

    @contextmanager
    def pause(self, patience: float | None = None) -> Iterator[None]:
        """Pass nothing on while the terminal has another use, such as a passphrase prompt.
        ``patience``: how many seconds to wait for a terminal that takes no output; None for as long
        as it does not."""
        with self._wake:
            self._paused += 1
            self._wake.notify_all()
            self._wake.wait_for(lambda: self._quiet or self._done.is_set(), patience)
        try:
            yield
        finally:
            with self._wake:
                self._paused -= 1
                self._wake.notify_all()

    def _call(self, call: Callable[[], None]) -> None:
        with self._wake:
            self._calls.append(call)
            self._wake.notify_all()

    def _serve(self) -> None:
        try:
            while not self._step():
                pass
        except BaseException as error:  # noqa: BLE001 - `wait` raises it in the caller's thread
            self._error = error
            with suppress(Exception):
                self._receiver.suspend()
        finally:
            with self._wake:
                self._done.set()
                self._wake.notify_all()

    def _step(self) -> bool:
        """Pass on what has arrived. Returns whether the feed has ended."""
        now = time.monotonic()
        timeout = self._receiver.next_flush(now)
        with self._wake:
            if not self._unread:
                # A few reads a second, each of many streams, cost less than one for each piece.
                self._wake.wait_for(self._has_calls, max(0.0, self._read_at - now))
                self._waits_for_output = True
                self._wake.wait_for(lambda: self._has_calls() or self._grown, timeout)
                self._waits_for_output = False
            # Output before calls: a `skip` that came before this output is then among the calls.
            grown = self._take_grown()
            calls, self._calls = self._calls, deque()
            samples, self._samples = self._samples, {}
            paused = self._paused
        for call in calls:
            call()
        for sample in samples.values():
            self._receiver.on_event(sample)
        if paused:
            self._suspend()
        if grown and not self._muted:
            for stream, size in grown.items():
                followed = self._position(stream)
                if size > followed.reader.offset:  # `dtrain logs -f` gives all sizes repeatedly
                    followed.end = size
                    self._unread[followed] = None
            self._read_at = time.monotonic() + BETWEEN_READS
        self._pass_on()
        if self._ending and not self._unread:
            with self._wake:
                if self._calls or self._grown:
                    return False
            self._finish()
            return True
        self._flush()
        return False

    def _suspend(self) -> None:
        self._receiver.suspend()
        with self._wake:
            self._quiet = True
            self._wake.notify_all()
            self._wake.wait_for(lambda: not self._paused)
            self._quiet = False

    def _has_calls(self) -> bool:
        return bool(self._calls or self._paused)

    def _take_grown(self) -> dict[Stream, int]:
        grown: dict[Stream, int] = {}
        for _ in range(len(self._grown)):
            stream, size = self._grown.popitem()
            grown[stream] = max(size, grown.get(stream, 0))
        return dict(reversed(grown.items()))  # the stream that grew first is read first

    def _position(self, stream: Stream) -> _Position:
        if (known := self._followed.get(stream)) is None:
            known = self._followed[stream] = _Position(
                stream, self._receiver, timed=self._receiver.timed or self._by_arrival
            )
        return known

    def _pass_on(self) -> None:
        """Pass on the next data of each stream; with ``by_arrival``, all data. What is left of an
        attempt's output comes before that of the next one."""
        if self._parts is None:
            self._parts = self._next_parts()
        for part in self._parts:
            self._read(*part)
            if self._muted or self._paused:
                # All parts take long on a slow terminal. The rest of this one may be unread.
                self._parts = chain([part], self._parts)
                return
        self._parts = None

    def _next_parts(self) -> Iterator[_Part]:
        first = min((one.stream.attempt for one in self._unread), default=0)
        unread = [*enumerate(one for one in self._unread if one.stream.attempt == first)]
        if not self._by_arrival:
            ends = [min(one.end, one.reader.offset + _TURN) for _, one in unread]
            return chain.from_iterable(
                one.parts(number, end) for (number, one), end in zip(unread, ends, strict=True)
            )
        self._block = min(_TURN, max(_BLOCK, _AHEAD // max(1, len(unread))))
        return merge(*(one.parts(number, one.end) for number, one in unread))

    def _read(self, second: int, number: int, followed: _Position, until: int) -> None:
        """Pass on one part of a stream."""
        self._end_lines(followed.stream.attempt)
        followed.second = None if second < 0 else second
        reader = followed.reader
        while reader.offset < until:
            begun = reader.offset
            try:
                piece = reader.read(until, followed.end, self._block)
            except OSError as error:
                text = f"{followed.stream.path}: cannot show this output: {error.strerror}"
                self._receiver.on_event(NoticeShown(text))
                reader.offset = followed.end
                break
            # A hole ends a line: what comes after it is not its rest.
            text = followed.framer.flush() if reader.offset - begun > len(piece) else ""
            text += followed.framer.feed(piece)
            self._receiver.lines(followed.stream, text, followed.framer.partial, followed.second)
            self._passed += len(piece)
            if self._passed >= _TURN:
                self._flush()
                if self._muted or self._paused:
                    break
        if reader.offset >= followed.end:
            self._unread.pop(followed, None)

    def _end_lines(self, attempt: int | None = None) -> None:
        """Pass on the lines without a newline that attempts before ``attempt`` ended with; None:
        those of all attempts."""
        if attempt == self._attempt or self._muted:
            return
        self._attempt = attempt
        for stream, followed in self._followed.items():
            ended = attempt is None or stream.attempt < attempt
            if ended and followed not in self._unread and (text := followed.framer.flush()):
                self._receiver.lines(stream, text, "", followed.second)

    def _flush(self) -> None:
        self._passed = 0
        self._receiver.flush(time.monotonic())

    def _finish(self) -> None:
        self._end_lines()
        if self._report is not None:
            paths: dict[StreamKey, str] = {
                (stream.host, stream.role, stream.index, stream.fd): str(stream.path)
                for stream in self._followed
            }
            self._receiver.finished(self._report, paths)
        else:
            self._receiver.suspend()
