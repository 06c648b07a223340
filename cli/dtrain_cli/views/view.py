"""One thread that prints, so that nobody else ever waits for a terminal.

    session threads ── started, host_state, notice, output, progress, finished ──> View
    View's thread   ── reads what is new in the stream files ──> Display ──> stdout, stderr

What has been written by workers is never queued in memory: a call only says how long a file is,
and the thread reads it back in pieces, each stream in its turn, when the terminal takes more.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from dtrain.framing import LineFramer
from dtrain.runs.stored_file import open_output
from dtrain_cli.views.outlet import reader_gone

if TYPE_CHECKING:
    from dtrain.checks import Finding
    from dtrain.failures.cause import Report
    from dtrain.launchplan.plan import LaunchPlan
    from dtrain.runs.log_store import Stream
    from dtrain.runs.progress import Progress

StreamKey = tuple[str, str, int, str]
"""Host, role, index, and ``stdout`` or ``stderr``."""

_PIECE = 128 << 10
"""Bytes read from one stream before the next one has its turn."""


@dataclass(frozen=True, slots=True)
class Filters:
    """Which workers' output is shown; None shows all. Files always have everything."""

    ranks: frozenset[int] | None = None
    hosts: frozenset[str] | None = None

    def show(self, stream: Stream) -> bool:
        return (self.hosts is None or stream.host in self.hosts) and (
            self.ranks is None or stream.rank in self.ranks
        )


class Display(Protocol):
    """One form of output. All calls come from one thread, and may block."""

    limit: int
    """Bytes of one line that are shown."""

    def started(self, run: str, plan: LaunchPlan, folder: str) -> None: ...

    def attached(self, run: str, plan: LaunchPlan, folder: str) -> None: ...

    def again(self, attempt: int, plan: LaunchPlan) -> None: ...

    def known(self, plan: LaunchPlan) -> None:
        """Nothing to say, but these workers' output will come."""

    def host_state(self, host: str, state: str, detail: str) -> None: ...

    def checked(self, findings: Sequence[Finding]) -> None: ...

    def notice(self, text: str) -> None: ...

    def lines(self, stream: Stream, lines: list[str], partial: str) -> None:
        """Lines that ``stream`` completed, and what it shows of the next one."""

    def progress(self, host: str, report: Progress) -> None: ...

    def flush(self, now: float) -> None:
        """Write what has come together, unless it is better to wait for more."""

    def next_flush(self, now: float) -> float | None:
        """Seconds after which `flush` has something to do without being told anything new."""

    def suspend(self) -> None:
        """Write everything and leave the cursor on an empty line."""

    def finished(self, report: Report, paths: Mapping[StreamKey, str]) -> None:
        """The last call. ``paths`` has each stream's file."""


class _Followed:
    """How far one stream has been shown."""

    def __init__(self, stream: Stream, limit: int) -> None:
        self.framer = LineFramer(limit=limit, whole_in=str(stream.path))
        self.offset = 0


class View:
    """Shows a run as it goes on (see `session.observer.Observer`). Calls return at once."""

    def __init__(
        self,
        display: Callable[[Callable[[OSError], None]], Display],
        filters: Filters,
        on_broken_pipe: Callable[[], None],
    ) -> None:
        """``display`` is called with what to do when stdout or stderr fails. ``on_broken_pipe``
        is called once, from the printing thread, when the reader of either is gone."""
        self._filters = filters
        self._on_broken_pipe = on_broken_pipe
        self._broken = False
        self.output_error: OSError | None = None
        """Why stdout or stderr can no longer be written, where its reader is not gone."""
        self._wake = threading.Condition()
        self._calls: deque[Callable[[], None]] = deque()
        self._grown: dict[Stream, int] = {}
        self._paused = 0
        self._quiet = False
        self._hurry = False
        # The rest belongs to the printing thread.
        self._followed: dict[Stream, _Followed] = {}
        self._unread: dict[Stream, int] = {}
        self._ending = False
        self._report: Report | None = None
        self._error: BaseException | None = None
        self._done = threading.Event()
        self._display = display(self._output_failed)
        threading.Thread(target=self._serve, name="dtrain-view", daemon=True).start()

    def started(self, run: str, plan: LaunchPlan, folder: str) -> None:
        self._call(lambda: self._display.started(run, plan, folder))

    def attached(self, run: str, plan: LaunchPlan, folder: str) -> None:
        self._call(lambda: self._display.attached(run, plan, folder))

    def again(self, attempt: int, plan: LaunchPlan) -> None:
        self._call(lambda: self._display.again(attempt, plan))

    def host_state(self, host: str, state: str, detail: str = "") -> None:
        self._call(lambda: self._display.host_state(host, state, detail))

    def checked(self, findings: Sequence[Finding]) -> None:
        self._call(lambda: self._display.checked(findings))

    def notice(self, text: str) -> None:
        self._call(lambda: self._display.notice(text))

    def skip(self, stream: Stream, size: int) -> None:
        def skip() -> None:
            self._followed[stream] = followed = _Followed(stream, self._display.limit)
            followed.offset = size

        self._call(skip)

    def progress(self, host: str, report: Progress) -> None:
        if not self._hurry:
            self._call(lambda: self._display.progress(host, report))

    def output(self, stream: Stream, size: int) -> None:
        if self._hurry or not self._filters.show(stream):
            return
        with self._wake:
            if size > self._grown.get(stream, 0):
                self._grown[stream] = size
                self._wake.notify_all()

    def finished(self, report: Report) -> None:
        self._end(report)

    def left(self, run: str, *, goes_on: bool = True) -> None:
        if goes_on:
            how = f"the job goes on: `dtrain attach {run}` takes it up"
        else:
            how = f"nothing of it runs now: `dtrain attach {run}` starts it again"
        self.notice(f"left; {how}, `dtrain stop {run}` ends it")
        self._end(None)

    def known(self, plan: LaunchPlan) -> None:
        """Instead of `started`, where nothing is to be said but what workers say."""
        self._call(lambda: self._display.known(plan))

    def close(self) -> None:
        """Instead of `finished`, where nothing is to be said of the end."""
        self._end(None)

    def _end(self, report: Report | None) -> None:
        def end() -> None:
            self._ending, self._report = True, report

        self._call(end)

    def wait(self, timeout: float | None = None) -> bool:
        """Whether everything, the report included, has been written within ``timeout`` seconds
        after `finished`. Raises what the printing thread died of, if it did."""
        done = self._done.wait(timeout)
        if self._error is not None:
            raise self._error
        return done

    def hurry(self) -> None:
        """Skip the output that is not shown yet: it is in the files, and somebody is waiting."""
        self.mute()

    def mute(self) -> None:
        """From now on show no worker's output: it is in the files."""
        self._hurry = True
        self._call(self._unread.clear)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """While the terminal is used for something else, a passphrase say, nothing is printed."""
        with self._wake:
            self._paused += 1
            self._wake.notify_all()
            self._wake.wait_for(lambda: self._quiet or self._done.is_set())
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

    def _output_failed(self, error: OSError) -> None:
        if not reader_gone(error):
            self.output_error = error
            self.notice(f"output is no longer shown: {error.strerror}")
        elif not self._broken:
            self._broken = True
            self._on_broken_pipe()

    def _serve(self) -> None:
        try:
            while not self._step():
                pass
        except BaseException as error:  # noqa: BLE001 - `wait` raises it where somebody sees it
            self._error = error
        finally:
            with self._wake:
                self._done.set()
                self._wake.notify_all()

    def _step(self) -> bool:
        """Print what there is. Whether that was the end."""
        timeout = self._display.next_flush(time.monotonic())
        with self._wake:
            if not self._unread:
                self._wake.wait_for(self._something, timeout)
            calls, self._calls = self._calls, deque()
            grown, self._grown = self._grown, {}
            paused = self._paused
        for call in calls:
            call()
        if paused:
            self._rest()
        if not self._hurry:
            self._unread.update(grown)
        read = 0
        for stream in list(self._unread):
            read += self._show(stream)
            if read >= 2 * _PIECE:
                self._display.flush(time.monotonic())
                read = 0
        if self._ending and not self._unread:
            with self._wake:
                if self._calls or self._grown:
                    return False
            self._finish()
            return True
        self._display.flush(time.monotonic())
        return False

    def _rest(self) -> None:
        self._display.suspend()
        with self._wake:
            self._quiet = True
            self._wake.notify_all()
            self._wake.wait_for(lambda: not self._paused)
            self._quiet = False

    def _something(self) -> bool:
        return bool(self._calls or self._grown or self._paused)

    def _show(self, stream: Stream) -> int:
        """Show one piece of a stream; its bytes."""
        followed = self._followed.get(stream)
        if followed is None:
            followed = self._followed[stream] = _Followed(stream, self._display.limit)
        size = self._unread[stream]
        try:
            # Opened for each piece: there may be more streams than a process may have open files.
            fd = open_output(stream.path)
            try:
                piece = os.pread(fd, min(_PIECE, size - followed.offset), followed.offset)
            finally:
                os.close(fd)
        except OSError as error:
            self._display.notice(f"{stream.path}: cannot show this output: {error.strerror}")
            piece = b""
        followed.offset += len(piece)
        if not piece or followed.offset >= size:
            # No piece before the end: somebody has cut or removed the file.
            followed.offset = max(followed.offset, size)
            del self._unread[stream]
        if piece:
            self._display.lines(stream, followed.framer.feed(piece), followed.framer.partial)
        return len(piece)

    def _finish(self) -> None:
        paths: dict[StreamKey, str] = {}
        for stream, followed in self._followed.items():
            paths[stream.host, stream.role, stream.index, stream.fd] = str(stream.path)
            if not self._hurry and (lines := followed.framer.flush()):
                self._display.lines(stream, lines, "")
        if self._report is not None:
            self._display.finished(self._report, paths)
        else:
            self._display.suspend()
